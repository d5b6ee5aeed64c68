"""The one door to calls into the Rust tokenizers library, which reports bad data as plain exceptions or panics."""

from collections.abc import Callable
from typing import Any

from ..errors import BadTokenizer, MlxrtError


def rust_call(what: str, call: Callable[[], Any]) -> Any:
    """`call`, its refusals turned into a BadTokenizer that names `what`."""
    try:
        return call()
    except MlxrtError:
        raise
    except Exception as e:  # the library raises Exception itself for bad data, so nothing narrower exists
        raise BadTokenizer(f"{what} cannot be used: {first_line(e)}") from None
    except BaseException as e:
        if type(e).__name__ != "PanicException":  # not exported anywhere; it derives from BaseException
            raise
        raise BadTokenizer(f"{what} cannot be used: the tokenizers library gave up: {first_line(e)}") from None


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
