# Every GPU figure of docs/numbers.md in one call of five minutes: bash bench/gpu/all.sh OUT.
#
# MLX compiles a custom kernel anew in every process, 2.5 s each: all processes build and compile side by side and then
# measure one after another (bench/gpu/turn.py), the most important first. The harness itself (`mlxrt bench`) runs while
# the others compile: its figures are ratios of engines that take turns within it.
OUT=${1:-build/gpu}; mkdir -p "$OUT"
start=$(date +%s); n=0
later() { n=$((n + 1)); name=$1; shift; MLXRT_TURN=$((start + ${READY:-105} + n)) timeout -k 1 290 python3 -m "$@" --turn /tmp/turn > "$OUT/$name" 2>&1 & }
right() { timeout -k 1 200 python3 -m bench.gpu.ops --no-speed --only "$1" > "$OUT/ops-$1" 2>&1 & }

timeout -k 1 110 python3 -m mlxrt bench decode prefill -m shape:qwen3-0.6b@4bit --peer mlx-lm --minutes 0.7 \
    --json "$OUT/bench.json" --html "$OUT/bench.html" > "$OUT/bench" 2>&1 &
later 0.6b bench.gpu.decode qwen3-0.6b@4bit --runs 1x512,1x4096 --tokens 128 --json "$OUT/0.6b.json"
later 8b bench.gpu.decode qwen3-8b@4bit --runs 1x512,1x4096,32x128 --json "$OUT/8b.json"
later 30b bench.gpu.decode qwen3-30b-a3b@4bit --runs 1x512,32x128,1x4096 --json "$OUT/30b.json"
later gemma4 bench.gpu.decode gemma4-e2b@4bit --runs 1x512,1x4096 --json "$OUT/gemma4.json"
later jang bench.gpu.jang --layers 8 --unproved
later products bench.gpu.ops --only "" --rows 1,32 --json "$OUT/products.json"
later context-1 bench.gpu.context --layers 12 --json "$OUT/context-1.json"
later context-8 bench.gpu.context --layers 4 --batch 8 --json "$OUT/context-8.json"
for op in matvec matmul attend_pages attend_packed route expert_gate_up,expert_down grouped_product,order_pairs,mix \
    embed_rows,add_norm,greedy,turn coded_rows,coded_gate_up,coded_down,coded_unpack,vector_rows; do right "$op"; done
timeout -k 1 280 nice python3 -m mlxrt doctor --quick --dtype bfloat16 > "$OUT/doctor" 2>&1 &
wait
for f in "$OUT"/ops-* "$OUT"/0.6b "$OUT"/8b "$OUT"/30b "$OUT"/gemma4 "$OUT"/jang "$OUT"/products "$OUT"/context-? "$OUT"/doctor; do
    echo "== $f"; grep -v "^{.total_memory" "$f" | tail -n 24 | cut -c1-230
done
tail -n 30 "$OUT/bench"
tar -C "$OUT" -cf /tmp/all.tar . && rm -r "$OUT"/* && mv /tmp/all.tar "$OUT/"
date
