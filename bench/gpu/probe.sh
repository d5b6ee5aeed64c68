# Scratch: everything of a session in one call. Compilers first, side by side; then one measurement after the other.
T="timeout -k 1"
(
$T 150 python3 -m bench.gpu.decode qwen3-30b-a3b@4bit --tokens 4 --rounds 1 --batches 1 > $OUT/w30 2>&1 &
$T 140 python3 -m bench.gpu.decode qwen3-8b@4bit --tokens 4 --rounds 1 --batches 1,8,32 > $OUT/w8 2>&1 &
$T 140 python3 -m bench.gpu.decode qwen3-0.6b@4bit --tokens 4 --rounds 1 --batches 1,8,32 > $OUT/w06 2>&1 &
$T 140 python3 -m bench.gpu.decode gemma4-e2b@4bit --tokens 4 --rounds 1 > $OUT/w4 2>&1 &
$T 140 python3 -m bench.gpu.ops --only "" --rows 1,32 > $OUT/wops 2>&1 &
$T 140 python3 -m bench.gpu.ops --only matvec,turn --no-speed > $OUT/ops 2>&1 &
$T 140 python3 -m bench.gpu.jang --layers 1 --repeat 1 > $OUT/wjang 2>&1 &
$T 140 python3 -m bench.gpu.context --layers 2 --new 4 --tokens 32768 > $OUT/wctx 2>&1 &
$T 140 python3 -m bench.gpu.context --layers 1 --new 4 --tokens 32768 --batch 8 > $OUT/wctx8 2>&1 &
wait )
date; tail -qn 3 $OUT/w* $OUT/ops | cut -c1-400
$T 40 python3 -m bench.gpu.decode qwen3-0.6b@4bit --batches 1,8,32 --json $OUT/06.json 2>&1 | tail -4
$T 60 python3 -m bench.gpu.decode qwen3-8b@4bit --batches 1,8,32 --json $OUT/8.json 2>&1 | tail -4
$T 50 python3 -m bench.gpu.decode qwen3-30b-a3b@4bit --batches 1 --json $OUT/30.json 2>&1 | tail -2
$T 30 python3 -m bench.gpu.decode gemma4-e2b@4bit --batches 1 --json $OUT/4.json 2>&1 | tail -2
$T 25 python3 -m bench.gpu.ops --only "" --rows 1 2>&1 | tail -9
$T 40 python3 -m bench.gpu.jang --layers 8 2>&1 | tail -3
$T 40 python3 -m bench.gpu.context 2>&1 | tail -3
$T 40 python3 -m bench.gpu.context --layers 6 --batch 8 2>&1 | tail -3
$T 30 python3 -m bench.gpu.decode qwen3-30b-a3b@4bit --batches 32 --prompts 64 --rounds 1 2>&1 | tail -1
date; tar cf $OUT/all.tar -C $OUT $(ls $OUT | grep -v tar)
