# Every GPU figure of docs/numbers.md in one call: bash bench/gpu/all.sh OUT. About eight minutes on a fresh machine.
#
# A kernel is compiled twice, by MLX (kept in its own folder) and by the driver (kept in CUDA_CACHE_PATH): both caches are
# filled first, by short runs side by side, so that what is timed afterwards runs alone and does not wait for compilers.
# MLX's own gather_qmm alone takes 40 s to compile; mlx-lm needs it, too.
OUT=${1:-build/gpu}; mkdir -p "$OUT"
export CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-/tmp/mlxrt-cuda-cache} CUDA_CACHE_MAXSIZE=4294967296
decode() { timeout -k 1 "$1" python3 -m bench.gpu.decode "${@:2}"; }

(
for shape in qwen3-30b-a3b qwen3-8b qwen3-0.6b gemma4-e2b; do
    decode 200 "$shape@4bit" --tokens 4 --rounds 1 > "$OUT/warm-$shape" 2>&1 &
done
timeout -k 1 200 python3 -m bench.gpu.ops > "$OUT/ops" 2>&1 &
timeout -k 1 200 python3 -m bench.gpu.jang --layers 1 --repeat 1 > "$OUT/warm-jang" 2>&1 &
timeout -k 1 200 python3 -m bench.gpu.context --layers 1 --new 4 > "$OUT/warm-context" 2>&1 &
wait
)
tail -qn 2 "$OUT"/warm-* "$OUT/ops" | cut -c1-300
date
decode 60 qwen3-0.6b@4bit --batches 1,8,32 --json "$OUT/0.6b.json"
# A step in one graph: its weights are then the same from step to step, and updating the graph may cost less.
MLX_MAX_OPS_PER_BUFFER=400 MLX_MAX_MB_PER_BUFFER=100000 decode 60 qwen3-0.6b@4bit --json "$OUT/0.6b-one-graph.json"
decode 80 qwen3-8b@4bit --batches 1,8,32 --json "$OUT/8b.json"
decode 60 qwen3-30b-a3b@4bit --json "$OUT/30b.json"
decode 40 gemma4-e2b@4bit --json "$OUT/gemma4.json"
timeout -k 1 60 python3 -m bench.gpu.ops --only "" --rows 1 --json "$OUT/products.json"
timeout -k 1 60 python3 -m bench.gpu.jang --layers 8 | tee "$OUT/jang"
timeout -k 1 60 python3 -m bench.gpu.context --json "$OUT/context-1.json"
timeout -k 1 60 python3 -m bench.gpu.context --layers 6 --batch 8 --json "$OUT/context-8.json"
decode 90 qwen3-30b-a3b@4bit --batches 32 --prompts 128 --rounds 1 --json "$OUT/30b-32.json"
timeout -k 1 60 python3 -m mlxrt doctor | tee "$OUT/doctor"
date
