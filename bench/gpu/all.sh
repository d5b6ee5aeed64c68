# Every GPU figure of docs/numbers.md in one call of under nine minutes: bash bench/gpu/all.sh OUT; OUT/all.tar holds the files.
#
# Our kernels are compiled once and kept; MLX's own, mlx-lm's gather_qmm for one, are compiled in every process: all
# processes build side by side and then measure one after another (bench/gpu/turn.py), the most important first. The
# harness itself (`mlxrt bench`) comes last, alone. JANG=1 measures JANG too.
OUT=${1:-build/gpu}; mkdir -p "$OUT"; work=$(mktemp -d); mkdir "$work/out"
export PYTHONUNBUFFERED=1
export MLXRT_TURN=$((5 + ${JANG:+1} + 0))  # how many of the following there are
later() {
    name=$1; shift
    timeout -k 1 ${MOST:-400} python3 -m "$@" --turn "$work/turn" > "$work/out/$name" 2>&1 &
}
right() { timeout -k 1 200 python3 -m bench.gpu.ops --no-speed --only "$1" > "$work/out/ops-$1" 2>&1 & }
harness() {
    shape=$1; seconds=$2; shift 2
    timeout -s INT -k 10 "$seconds" python3 -m mlxrt bench "$@" -m "shape:$shape@4bit" --peer mlx-lm \
        --json "$work/out/bench-$shape.json" --html "$work/out/bench-$shape.html" > "$work/out/bench-$shape" 2>&1
    keep
}
keep() { tar -C "$work/out" -cf "$OUT/all.tar" . 2> "$work/tar.log"; }

later 0.6b bench.gpu.decode qwen3-0.6b@4bit --runs 1x512,1x4096 --tokens 128 --json "$work/out/0.6b.json"
later 8b bench.gpu.decode qwen3-8b@4bit --runs 1x512,32x128,1x4096 --json "$work/out/8b.json"
later 30b bench.gpu.decode qwen3-30b-a3b@4bit --runs 1x512,32x128,1x4096 --json "$work/out/30b.json"
later gemma4 bench.gpu.decode gemma4-e2b@4bit --runs 1x512,1x4096 --json "$work/out/gemma4.json"
later products bench.gpu.ops --only "" --rows 1,8,32 --json "$work/out/products.json"
[ -n "$JANG" ] && later jang bench.gpu.jang --layers 8 --unproved --device
for op in matvec,matvec_of_sum,add_norm,embed_rows matmul,grouped_product,order_pairs,mix attend_pages attend_packed \
    attend_entry,route_gate_up route,expert_gate_up,expert_down,greedy,turn,coded_unpack,vector_rows,delta_step; do
    right "$op"
done
timeout -k 1 200 python3 -m bench.gpu.replay --programs 12 --kv full,q8 > "$work/out/replay" 2>&1 &
timeout -k 1 280 nice python3 -m mlxrt doctor --quick --dtype bfloat16 > "$work/out/doctor" 2>&1 &
while [ -n "$(jobs -r)" ]; do sleep 3; keep; done
# Three caches of 32,768 tokens at once: when the others have given their memory back.
timeout -k 1 90 python3 -m bench.gpu.context --layers 36 --json "$work/out/context-1.json" > "$work/out/context-1" 2>&1
timeout -k 1 90 python3 -m bench.gpu.context --layers 12 --batch 8 --json "$work/out/context-8.json" > "$work/out/context-8" 2>&1
harness qwen3-0.6b 105 decode prefill --lengths 512,4096 --minutes 1.5
harness qwen3-8b 80 decode --lengths 512 --minutes 1.1
for f in "$work"/out/ops-* "$work"/out/{0.6b,8b,30b,gemma4,context-1,context-8,products,doctor,replay,bench-qwen3-0.6b,bench-qwen3-8b}; do
    echo "== ${f##*/}"; tail -n 14 "$f" | cut -c1-200
done
date
