"""Does a run that is killed at any moment, again and again, end as if nothing had happened?

    python tests/kill.py [--kills 20]        # by hand: some minutes

Each case, small and on the tests' made-up data, runs once undisturbed. Then the same command is
started, and killed by SIGKILL at a random moment of its life: while it imports, trains, saves,
analyses. A run that finishes between the kills is compared, removed and begun anew, so that all the
kills are spent; the last life is left alone. Weights, log and results must be the same bits.
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
FEW = "--test-images 20 --test-networks 12"
CASES = [
    ("02_mnist_hypernet", f"--runs hypernet --steps 2000 --networks 4 --images 8 {FEW}"),
    ("03_cifar_lenet", f"--columns b --steps 500 --images 4 {FEW}"),
    ("03_cifar_lenet", f"--columns d+ --steps 200 --networks 2 --images 4 --averaged 20 {FEW}"),
    ("04_cifar_resnet32", f"--columns d+ --steps 80 --images 4 --averaged 12 --moments 20 {FEW}"),
]
CHILD = """
import importlib, sys
import conftest  # its checksums are those of the made-up data
script = importlib.import_module(sys.argv[1])
script.main(sys.argv[2:])
"""


def start(script, flags, folder, out):
    words = [*flags.split(), "--device", "cpu", "--data", str(folder / "data"), "--out", str(out)]
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n{CHILD}"
    return subprocess.Popen(
        [sys.executable, "-c", code, script, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def finish(process):
    """Wait for the end of a run that nobody kills."""
    _, error = process.communicate()
    if process.returncode != 0:
        sys.exit(f"a run failed by itself:\n{error.decode()}")


def half_written(out):
    return list(out.glob("*/*.pt.*"))


def state(out):
    """What a kill hit, as far as the files can tell."""
    file = next(out.glob("*/checkpoint.pt"), None)
    if file is None:
        return "before the first checkpoint"
    record = torch.load(file, weights_only=True)
    steps = record["settings"]["steps"]
    return "in training" if record["log"][-1]["step"] < steps else "after training"


def ending(out):
    """All that must not depend on kills: results and log, and the tensors of all networks."""
    (file,) = out.glob("*/metrics.json")
    metrics = json.loads(file.read_text())
    record = torch.load(file.with_name("checkpoint.pt"), weights_only=True)
    for row in metrics["log"] + record["log"]:
        del row["seconds"]
    tensors = list(record["model"].values())
    for layers in record.get("snapshots", []):
        tensors += layers
    return [metrics["settings"], metrics["log"], metrics["results"], record["log"]], tensors


def same(one, other):
    numbers, tensors = one
    other_numbers, other_tensors = other
    if numbers != other_numbers or len(tensors) != len(other_tensors):
        return False
    return all(torch.equal(a, b) for a, b in zip(tensors, other_tensors))


def run_case(script, flags, kills, folder):
    begun = time.perf_counter()
    process = start(script, flags, folder, folder / "whole")
    while process.poll() is None and not any(folder.glob("whole/*/checkpoint.pt")):
        time.sleep(0.01)
    until_first = time.perf_counter() - begun  # of import, data and the first steps
    finish(process)
    whole = ending(folder / "whole")
    out = folder / "killed"
    hits = {}
    equal = []
    killed = 0
    while killed < kills:
        before = len(half_written(out))
        process = start(script, flags, folder, out)
        # Half of the lives end before they have done anything new; the others get a bit further.
        try:
            process.wait(random.uniform(0, 2 * until_first))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            killed += 1
            hit = "while saving" if len(half_written(out)) > before else state(out)
            hits[hit] = hits.get(hit, 0) + 1
        else:
            finish(process)
            equal.append(same(whole, ending(out)))
            shutil.rmtree(out)
    finish(start(script, flags, folder, out))
    equal.append(same(whole, ending(out)))

    text = ", ".join(f"{number} {hit}" for hit, number in sorted(hits.items()))
    verdict = "the same bits" if all(equal) else "DIFFERENT"
    print(f"{script} {flags.removesuffix(FEW).strip()}: {killed} kills ({text})", end="; ")
    print(f"{len(equal)} finished, {verdict}", flush=True)
    return all(equal)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="of each case; 20 unless given")
    parser.add_argument("--seed", type=int, default=0, help="of the moments; 0 unless given")
    parser.add_argument("--only", default="", help="cases whose script and flags contain this")
    args = parser.parse_args()
    random.seed(args.seed)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from conftest import write_data

    equal = []
    for script, flags in CASES:
        if args.only in f"{script} {flags}":
            with tempfile.TemporaryDirectory() as folder:
                write_data(Path(folder, "data"))
                equal.append(run_case(script, flags, args.kills, Path(folder)))
    sys.exit(0 if equal and all(equal) else 1)


if __name__ == "__main__":
    main()
