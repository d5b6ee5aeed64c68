// A threadgroup copies a piece: `height` rows of `width` bytes, as far apart as the pitches say (COPY in graph.py).
struct Piece {
    unsigned long long to, source;
    unsigned width, height, to_pitch, source_pitch;
};

template <typename T>
__device__ void copy_rows(const Piece& piece) {
    unsigned columns = piece.width / sizeof(T);
    for (unsigned i = threadIdx.x; i < columns * piece.height; i += blockDim.x) {
        unsigned long long row = i / columns;
        T* to = (T*)(piece.to + row * piece.to_pitch);
        const T* source = (const T*)(piece.source + row * piece.source_pitch);
        to[i % columns] = source[i % columns];
    }
}

extern "C" __global__ void __launch_bounds__(256) NAME(const Piece* pieces) {
    Piece piece = pieces[blockIdx.x];
    unsigned sizes = piece.width | piece.to_pitch | piece.source_pitch;
    if (((piece.to | piece.source | sizes) & 15) == 0) {
        copy_rows<uint4>(piece);
    } else {
        copy_rows<unsigned char>(piece);
    }
}
