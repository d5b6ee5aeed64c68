# Every GPU figure of docs/numbers.md in one call of six minutes: bash bench/gpu/all.sh OUT; OUT/all.tar holds the files.
#
# Our kernels are compiled once and kept; MLX's own, mlx-lm's gather_qmm for one, are compiled in every process: all
# processes build side by side and then measure one after another (bench/gpu/turn.py), the most important first. The
# harness itself (`mlxrt bench`) comes last, alone.
OUT=${1:-build/gpu}; mkdir -p "$OUT"; work=$(mktemp -d); mkdir "$work/out"
start=$(date +%s); n=0
later() {
    n=$((n + 1)); name=$1; shift
    MLXRT_TURN=$((start + ${READY:-70} + n)) timeout -k 1 300 python3 -m "$@" --turn "$work/turn" > "$work/out/$name" 2>&1 &
}
right() { timeout -k 1 200 python3 -m bench.gpu.ops --no-speed --only "$1" > "$work/out/ops-$1" 2>&1 & }
keep() { tar -C "$work/out" -cf "$OUT/all.tar" . 2> "$work/tar.log"; }

later 0.6b bench.gpu.decode qwen3-0.6b@4bit --runs 1x512,1x4096 --tokens 128 --json "$work/out/0.6b.json"
later 8b bench.gpu.decode qwen3-8b@4bit --runs 1x512,32x128,1x4096 --json "$work/out/8b.json"
later 30b bench.gpu.decode qwen3-30b-a3b@4bit --runs 1x512,32x128,1x4096 --json "$work/out/30b.json"
later jang bench.gpu.jang --layers 8 --unproved
later gemma4 bench.gpu.decode gemma4-e2b@4bit --runs 1x512,1x4096 --json "$work/out/gemma4.json"
later products bench.gpu.ops --only "" --rows 1,32 --json "$work/out/products.json"
later context-1 bench.gpu.context --layers 12 --json "$work/out/context-1.json"
later context-8 bench.gpu.context --layers 4 --batch 8 --json "$work/out/context-8.json"
for op in matvec matmul attend_pages attend_packed route expert_gate_up,expert_down grouped_product,order_pairs,mix \
    embed_rows,add_norm,matvec_of_sum,greedy,turn coded_unpack,vector_rows; do right "$op"; done
timeout -k 1 60 python3 -m bench.gpu.launch --inputs 2,8 > "$work/out/launch" 2>&1 &
timeout -k 1 280 nice python3 -m mlxrt doctor --quick --dtype bfloat16 > "$work/out/doctor" 2>&1 &
while [ -n "$(jobs -r)" ]; do sleep 5; keep; done
timeout -s INT -k 10 120 python3 -m mlxrt bench decode prefill -m shape:qwen3-0.6b@4bit --peer mlx-lm --minutes 1.5 \
    --lengths 512,4096 --json "$work/out/bench.json" --html "$work/out/bench.html" > "$work/out/bench" 2>&1
keep
for f in ops-matvec ops-matmul ops-attend_pages ops-attend_packed 0.6b 8b 30b gemma4 jang products context-1 context-8 doctor bench; do
    echo "== $f"; tail -n 14 "$work/out/$f" | cut -c1-200
done
date
