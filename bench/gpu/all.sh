# Right and fast in one call of under ten minutes: bash bench/gpu/all.sh OUT; OUT/all.tar holds the files.
#
# Our kernels are compiled once and kept; MLX's own, mlx-lm's gather_qmm for one, are compiled in every process: all
# processes build side by side, beside the checks, and measure one after another (bench/gpu/turn.py) when every check
# has ended. JANG=1 measures JANG too. Exit 1 if anything failed, by name. Long contexts and the harness: bench/gpu/long.sh.
OUT=${1:-build/gpu}; mkdir -p "$OUT"; work=$(mktemp -d); mkdir "$work/out"
export PYTHONUNBUFFERED=1
export MLXRT_TURN=$((5 + 1 + ${JANG:+1} + 0))  # as many as measure, and one for the checks
checks="" measured="" failed=0
check() {
    name=$1; shift
    timeout -k 1 ${CHECK:-200} python3 -m "$@" > "$work/out/$name" 2>&1 &
    checks="$checks $name=$!"
}
later() {
    name=$1; shift
    timeout -k 1 ${MOST:-520} python3 -m "$@" --turn "$work/turn" > "$work/out/$name" 2>&1 &
    measured="$measured $name=$!"
}
keep() { tar -C "$work/out" -cf "$OUT/all.tar" . 2> "$work/tar.log"; }
ended() { for one in "$@"; do wait "${one##*=}" || { echo "FAILED: ${one%=*}"; failed=1; }; done; }
show() { for name in "$@"; do echo "== $name"; tail -n 12 "$work/out/$name" | cut -c1-200; done; }

lscpu | grep "Model name"; date
later gemma4 bench.gpu.decode gemma4-e2b@4bit --runs 1x512,1x4096 --tokens 128 --json "$work/out/gemma4.json"
later 0.6b bench.gpu.decode qwen3-0.6b@4bit --runs 1x512,1x4096 --tokens 128 --json "$work/out/0.6b.json"
later 8b bench.gpu.decode qwen3-8b@4bit --runs 1x512,32x128,1x4096 --tokens 128 --json "$work/out/8b.json"
later 30b bench.gpu.decode qwen3-30b-a3b@4bit --runs 1x512,32x128,1x4096 --tokens 128 --json "$work/out/30b.json"
later products bench.gpu.ops --only "" --rows 1,8,32 --json "$work/out/products.json"
[ -n "$JANG" ] && later jang bench.gpu.jang --layers 8 --unproved --device
groups="qmv,add_norm_qmv,add_norm,embed_rows qmm,moe_grouped,moe_sort,moe_combine paged_attention quantized_paged_attention \
    qkv_attention,moe_router_gate_up moe_router,moe_gate_up,moe_down,argmax,hadamard,lut_dequantize,codebook_rows,gated_delta_step"
for ops in $groups; do check "ops-$ops" bench.gpu.ops --no-speed --only "$ops"; done
check gathered bench.gpu.gathered
check replay bench.gpu.replay --programs 6 --kv full,q8
check doctor mlxrt doctor --quick --dtype bfloat16
ended $checks; echo -n . >> "$work/turn.ready"; date
for ops in $groups; do show "ops-$ops" | tail -n 3; done; show gathered replay doctor; keep
while [ -n "$(jobs -r)" ]; do sleep 2; keep; done
ended $measured
show gemma4 0.6b 8b 30b products ${JANG:+jang}; date
exit $failed
