// Small copies at the beginning and at the end of a step's graph, by one threadgroup: the integers of this step, and what
// the host reads of it, to the host's memory (StepCopies in graph.py). Where there is a number of the step, it is one higher
// afterwards.
struct Copy {
    unsigned *to, *source;
    unsigned long long words;
};

struct Copies {
    unsigned* step;
    unsigned long long count;
    Copy copies[32];
};

extern "C" __global__ void __launch_bounds__(256) NAME(const __grid_constant__ Copies given) {
    WAIT
    unsigned step = given.step ? *given.step : 0;
    for (unsigned n = 0; n < given.count; n++) {
        const Copy& copy = given.copies[n];
        for (unsigned i = threadIdx.x; i < copy.words; i += blockDim.x)
            copy.to[i] = copy.source[step * copy.words + i];
    }
    __syncthreads();
    if (given.step && threadIdx.x == 0) *given.step = step + 1;
}
