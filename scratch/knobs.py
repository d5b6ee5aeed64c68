import sys, os, time
import mlxrt, mlx.core as mx
from bench.gpu import decode as d
d.peer_of = lambda *a: None
for shape in sys.argv[1].split(","):
    engine, _ = d.build(shape, "auto", 1024)
    p = d.prompts_of(engine.model.config.vocab_size, 1, 512)
    r = d.ours(engine, p, 128, rounds=3)
    # pure device+dispatch cost of the compiled step, without sampling: chain steps
    print({k:v for k,v in os.environ.items() if k.startswith("MLX_M")}, shape, f"{r[0]:.0f} tok/s prefill {r[1]:.0f}", flush=True)
    engine.close()
