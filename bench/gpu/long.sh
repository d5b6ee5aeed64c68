# Long contexts, right and then fast, each alone, in under seven minutes: bash bench/gpu/long.sh OUT
#
# HARNESS=1 runs `mlxrt bench` too, three minutes more. Exit 1 if anything failed, by name.
OUT=${1:-build/gpu}; mkdir -p "$OUT"
export PYTHONUNBUFFERED=1
failed=0
fails() { echo "FAILED: $1"; failed=1; }
context() {
    name=$1; shift
    timeout -k 1 150 python3 -m bench.gpu.context --rounds 5 --json "$OUT/$name.json" "$@" > "$OUT/$name" 2>&1 || fails "$name"
    tail -n 5 "$OUT/$name" | cut -c1-200
}
harness() {
    shape=$1; seconds=$2; shift 2
    timeout -s INT -k 10 "$seconds" python3 -m mlxrt bench "$@" -m "shape:$shape@4bit" --peer mlx-lm \
        --json "$OUT/bench-$shape.json" > "$OUT/bench-$shape" 2>&1 || fails "bench-$shape"
    tail -n 14 "$OUT/bench-$shape" | cut -c1-200
}
coded() {
    name=$1; shift
    timeout -k 1 150 python3 -m bench.gpu.coded "$@" > "$OUT/$name" 2>&1 || fails "$name"
    tail -n 5 "$OUT/$name" | cut -c1-200
}
coded coded-1 --layers 4 --kinds full,q8,k8v4,q4; date
coded coded-8 --layers 4 --batch 8; date
context context-1 --layers 36; date
context context-8q8 --layers 36 --batch 8 --kinds full,q8; date  # three such caches at once would fill the device
context context-8q4 --layers 36 --batch 8 --kinds full,q4; date
[ -n "$HARNESS" ] && harness qwen3-0.6b 105 decode prefill --lengths 512,4096 --minutes 1.5
[ -n "$HARNESS" ] && harness qwen3-8b 80 decode --lengths 512 --minutes 1.1
date
exit $failed
