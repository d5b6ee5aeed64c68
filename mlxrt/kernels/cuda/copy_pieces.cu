// Threadgroups copy pieces: each `height` rows of `width` bytes, as far apart as the pitches say (COPY in graph.py). How many
// pieces there are stands where the first one's address would; they lie after that.
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

extern "C" __global__ void __launch_bounds__(256) NAME(const Piece* table) {
    unsigned long long count = table[0].to;
    for (unsigned n = blockIdx.x; n < count; n += gridDim.x) {
        Piece piece = table[1 + n];
        unsigned sizes = piece.width | piece.to_pitch | piece.source_pitch;
        if (((piece.to | piece.source | sizes) & 15) == 0) {
            copy_rows<uint4>(piece);
        } else {
            copy_rows<unsigned char>(piece);
        }
    }
}
