"""Does a run that is killed at any moment, again and again, end as if nothing had happened?

    python tests/kill.py [--kills 20]        # by hand: some minutes

Each case, small and on made-up data, runs once undisturbed. Then the same command is started, and
killed by SIGKILL at a random moment of its life: while it imports, trains, saves, analyses. A run
that finishes between the kills is compared, removed and begun anew, so that all the kills are
spent; the last life is left alone. Model, chain, log and results must be the same bits.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
SMALL = "--quick --fake-data --device cpu"
CASES = [
    ("02_mnist_hypernet", f"--runs hypernet --steps 2000 --networks 4 --images 8 {SMALL}"),
    ("03_cifar_lenet", f"--columns b --steps 500 --images 4 {SMALL}"),
    ("03_cifar_lenet", f"--columns d+ --steps 200 --networks 2 --images 4 {SMALL}"),
    ("04_cifar_resnet32", f"--columns d+ --steps 100 --networks 2 --images 4 {SMALL}"),
]
# Saved twice a second, besides the rows of the log. One block in a stage of ResNet-32, few images.
CHILD = """
import importlib, sys
script = importlib.import_module(sys.argv[1])
script.SAVE_SECONDS = 0.5
if hasattr(script, "BLOCKS"):
    script.BLOCKS, load_data = 1, script.load_data
    script.load_data = lambda args: {k: (x[:50], y[:50]) for k, (x, y) in load_data(args).items()}
script.main(sys.argv[2:])
"""


def start(script: str, flags: str, out: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", CHILD, script, *flags.split(), "--out", str(out)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen) -> None:
    """Wait for the end of a run that nobody kills."""
    error = process.communicate()[1].decode()
    if process.returncode != 0:
        sys.exit(f"a run failed by itself:\n{error}")


def state(out: Path) -> str:
    """What a kill hit, as far as the files can tell."""
    file = next(out.glob("*/checkpoint.pt"), None)
    if any(out.glob("*/*.new")):
        return "while saving"
    if file is None:
        return "before the first checkpoint"
    record = torch.load(file, weights_only=True)
    return "in training" if record["optimizers"] else "after training"


def ending(out: Path) -> tuple[dict, list[torch.Tensor]]:
    """All that must not depend on kills: results and log, and the tensors of model and chain."""
    (folder,) = (file.parent for file in out.glob("*/metrics.json"))
    metrics = json.loads((folder / "metrics.json").read_text())
    for name in ("command", "commit", "training_seconds", "analysis_seconds"):
        del metrics[name]
    record = torch.load(folder / "checkpoint.pt", weights_only=True)
    tensors = [*record["model"].values()]
    tensors += [tensor for theta in record.get("chain", []) for tensor in theta]
    return metrics | dict(step=record["step"], checkpoint_log=record["log"]), tensors


def same(a: tuple, b: tuple) -> bool:
    tensors = len(a[1]) == len(b[1]) and all(torch.equal(x, y) for x, y in zip(a[1], b[1]))
    return a[0] == b[0] and tensors


def run_case(script: str, flags: str, kills: int, folder: Path) -> bool:
    begun = time.perf_counter()
    process = start(script, flags, folder / "whole")
    while process.poll() is None and not any(folder.glob("whole/*/checkpoint.pt")):
        time.sleep(0.01)
    until_first = time.perf_counter() - begun  # of import, data and the first steps
    finish(process)
    whole, out, hits, equal = ending(folder / "whole"), folder / "killed", {}, []
    killed = 0
    while True:
        process = start(script, flags, out)
        if killed == kills:
            finish(process)
            equal.append(same(whole, ending(out)))
            break
        # Half of the lives end before they have done anything new; the others get a bit further.
        try:
            process.wait(random.uniform(0, 2 * until_first))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            killed += 1
            hit = state(out)
            hits[hit] = hits.get(hit, 0) + 1
        else:
            finish(process)
            equal.append(same(whole, ending(out)))
            shutil.rmtree(out)
    hits = ", ".join(f"{number} {hit}" for hit, number in sorted(hits.items()))
    verdict = "the same bits" if all(equal) else "DIFFERENT"
    print(f"{script} {flags.removesuffix(SMALL).strip()}: {killed} kills ({hits})", end="; ")
    print(f"{len(equal)} finished, {verdict}", flush=True)
    return all(equal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="of each case; 20 unless given")
    parser.add_argument("--seed", type=int, default=0, help="of the moments; 0 unless given")
    parser.add_argument("--only", default="", help="cases whose script and flags contain this")
    args = parser.parse_args()
    random.seed(args.seed)
    equal = []
    for script, flags in CASES:
        if args.only in f"{script} {flags}":
            with tempfile.TemporaryDirectory() as folder:
                equal.append(run_case(script, flags, args.kills, Path(folder)))
    sys.exit(0 if equal and all(equal) else 1)


if __name__ == "__main__":
    main()
