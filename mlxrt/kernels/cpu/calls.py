"""The arguments of the library's calls, as calls.h has them. Imports no MLX: check.py reads it too."""

import ctypes

FORMATS = {
    "affine": 0,
    "q2_k": 1,
    "q3_k": 2,
    "q4_k": 3,
    "q5_k": 4,
    "q6_k": 5,
    "iq2_xxs": 6,
    "iq4_xs": 7,
    "iq4_nl": 8,
    "q8_0": 9,
    "q4_0": 10,
    "q4_1": 11,
    "mxfp4": 12,
    "dense": 13,
}
ERRORS = {1: "no memory", 2: "a format that the library does not read", 3: "a call that the library does not have"}

Fields = tuple[tuple[str, type], ...]


def fields(kind: type, names: str) -> Fields:
    return tuple((name, kind) for name in names.split())


class Matrix(ctypes.Structure):
    """`matrix` of packed.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "weight scales biases"),
        *fields(ctypes.c_int64, "rows width row_bytes"),
        *fields(ctypes.c_int32, "format bits group scale_type interleaved"),
    )


class MatmulCall(ctypes.Structure):
    kind = 0
    _fields_ = (
        *fields(ctypes.c_void_p, "matrix x norm bias times residual y"),
        *fields(ctypes.c_int64, "columns"),
        *fields(ctypes.c_float, "eps softcap"),
        *fields(ctypes.c_int32, "activation pair"),
    )


class EmbedCall(ctypes.Structure):
    kind = 1
    _fields_ = (
        *fields(ctypes.c_void_p, "matrix tokens y"),
        *fields(ctypes.c_int64, "count"),
        *fields(ctypes.c_float, "scale"),
    )


class NormCall(ctypes.Structure):
    kind = 2
    _fields_ = (
        *fields(ctypes.c_void_p, "x weight residual scalar y"),
        *fields(ctypes.c_int64, "rows width groups"),
        *fields(ctypes.c_float, "eps scale"),
    )


class AttentionCall(ctypes.Structure):
    kind = 3
    _fields_ = (
        *fields(ctypes.c_void_p, "qkv pool tail table table_row row_range q_norm k_norm inv_freq sinks out finite"),
        *fields(
            ctypes.c_int64,
            "rows heads kv_heads dim words pool_blocks size row_blocks tail_size pairs window keep new_heads",
        ),
        *fields(ctypes.c_float, "eps magnitude scale softcap"),
        *fields(ctypes.c_int32, "v_norm tied key_bits value_bits group"),
    )


class ArgmaxCall(ctypes.Structure):
    kind = 4
    _fields_ = (*fields(ctypes.c_void_p, "x tokens status"), *fields(ctypes.c_int64, "rows width"))


class ConcatCall(ctypes.Structure):
    kind = 5
    _fields_ = (*fields(ctypes.c_void_p, "a b c d y"), *fields(ctypes.c_int64, "rows a_width b_width c_width d_width"))


class ExpertsCall(ctypes.Structure):
    kind = 6
    _fields_ = (
        *fields(ctypes.c_void_p, "matrix x order bounds bias y"),
        *fields(ctypes.c_int64, "pairs count each"),
        *fields(ctypes.c_int32, "activation pair"),
    )


class DrawCall(ctypes.Structure):
    kind = 7
    _fields_ = (
        *fields(ctypes.c_void_p, "x table offset newest recent mask y tokens status after"),
        *fields(ctypes.c_int64, "rows width words recents"),
    )


class LogprobsCall(ctypes.Structure):
    kind = 8
    _fields_ = (*fields(ctypes.c_void_p, "x status result logprobs"), *fields(ctypes.c_int64, "rows width count"))


class RouterCall(ctypes.Structure):
    kind = 9
    _fields_ = (
        *fields(ctypes.c_void_p, "matrix x norm bias correction scales experts weights"),
        *fields(ctypes.c_int64, "rows k"),
        *fields(ctypes.c_float, "eps"),
        *fields(ctypes.c_int32, "sigmoid normalise"),
    )


class SortCall(ctypes.Structure):
    kind = 10
    _fields_ = (*fields(ctypes.c_void_p, "experts order bounds"), *fields(ctypes.c_int64, "pairs count"))


class CombineCall(ctypes.Structure):
    kind = 11
    _fields_ = (*fields(ctypes.c_void_p, "parts weights residual y"), *fields(ctypes.c_int64, "rows k width"))


class EncodeCall(AttentionCall):
    """The keys and values of tokens, into `tail`."""

    kind = 12


class Call(ctypes.Structure):
    """`call` of calls.h: the kind and the address of one of the above."""

    _fields_ = (("kind", ctypes.c_int32), ("arguments", ctypes.c_void_p))


Arguments = (
    MatmulCall | EmbedCall | NormCall | AttentionCall | ArgmaxCall | ConcatCall | ExpertsCall | DrawCall | LogprobsCall
    | RouterCall | SortCall | CombineCall
)  # fmt: skip


class CallList:
    """Calls that run one after another, without Python between them. Holds their arguments, not the arrays they name."""

    def __init__(self, arguments: list[Arguments]):
        self.arguments = arguments
        self._calls = (Call * len(arguments))(*(Call(a.kind, ctypes.addressof(a)) for a in arguments))

    def run(self, library: ctypes.CDLL, threads: int) -> None:
        if error := library.mlxrt_run(self._calls, len(self.arguments), threads):
            raise RuntimeError(f"CPU kernels: {ERRORS.get(error, error)}")


def open_library(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    library.mlxrt_run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    library.mlxrt_vector_name.restype = ctypes.c_char_p
    return library
