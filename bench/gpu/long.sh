# Long contexts, then the harness itself, each alone, in under seven minutes: bash bench/gpu/long.sh OUT
OUT=${1:-build/gpu}; mkdir -p "$OUT"
export PYTHONUNBUFFERED=1
context() {
    name=$1; shift
    timeout -k 1 100 python3 -m bench.gpu.context --rounds 5 --json "$OUT/$name.json" "$@" > "$OUT/$name" 2>&1
    tail -n 5 "$OUT/$name" | cut -c1-200
}
harness() {
    shape=$1; seconds=$2; shift 2
    timeout -s INT -k 10 "$seconds" python3 -m mlxrt bench "$@" -m "shape:$shape@4bit" --peer mlx-lm \
        --json "$OUT/bench-$shape.json" > "$OUT/bench-$shape" 2>&1
    tail -n 14 "$OUT/bench-$shape" | cut -c1-200
}
context context-1 --layers 36; date
context context-8 --layers 12 --batch 8; date
[ -n "$HARNESS" ] && harness qwen3-0.6b 105 decode prefill --lengths 512,4096 --minutes 1.5
[ -n "$HARNESS" ] && harness qwen3-8b 80 decode --lengths 512 --minutes 1.1
date
