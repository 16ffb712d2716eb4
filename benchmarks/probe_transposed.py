import subprocess
import sys

if len(sys.argv) > 1:
    import torch

    import fl_pallas as fl

    d, dt, s = int(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3])

    def f(q, k, v):
        return torch.softmax(q @ k.mT / 8, -1) @ v

    bad = ""
    for name, mk in dict(
        k=lambda t: t.mT.contiguous().mT, inter=lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2]
    ).items():
        for w in ("q", "k", "v", "qkv"):
            x = [torch.randn(2, 3, s, d, device="cuda", dtype=dt) for _ in range(3)]
            x = [mk(t) if n in w else t for n, t in zip("qkv", x)]
            with torch.no_grad():
                o = fl.compile(f)(*x)
                torch.cuda.synchronize()
            r = f(*(t.double() for t in x))
            e = f(*x)
            err = ((o.double() - r).norm() / r.norm()).item()
            ee = ((e.double() - r).norm() / r.norm()).item()
            if not err <= max(1.5 * ee, 1e-5):
                bad += f"{name}/{w}:{err:.1e} "
    print(sys.argv[1:], "BAD " + bad if bad else "ok")
else:
    from concurrent.futures import ThreadPoolExecutor

    def go(a):
        r = subprocess.run([sys.executable, "-W", "ignore", __file__, *map(str, a)], capture_output=True, text=True)
        return r.stdout.strip() or f"{a} FAILED " + r.stderr.strip().splitlines()[-1][:150]

    cases = [
        (d, t, s) for d in (16, 24, 32, 64, 80, 128) for t in ("bfloat16", "float32") for s in (17, 100, 257, 1024)
    ]
    with ThreadPoolExecutor(8) as p:
        for line in p.map(go, cases):
            print(line, flush=True)
