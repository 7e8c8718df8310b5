"""Kills a run of an experiment with SIGKILL at random moments, then runs it once more and looks for anything lost, doubled or half done.

    python tests/kill.py --experiment quickstart --kills 50 --home DIRECTORY

With ``--home`` empty this takes about as long as the experiment and a start of Python per kill. Prints what it found; exit code 1 if that is
anything. A shorter version, on a tiny model, runs in the suite (``tests/assets/test_kill.py``).
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from assay.assets.ledger import Ledger
from assay.assets.plan import missing, plan
from assay.assets.workspace import Workspace
from assay.definitions import OWN_EXPERIMENTS
from assay.schemas.graph import build_graph
from assay.warehouse.database import connect

# A fact is one number: these columns name it. Of timings each run's is a fact of its own.
DOUBLED = """
    SELECT artifact_digest, protocol_digest, metric, slice_kind, slice, seed, device_digest, run, count(*) AS times FROM measurement
    GROUP BY ALL HAVING count(*) > 1
"""


def command(experiment: str) -> list[str]:
    return [sys.executable, "-c", "from assay.definitions import main; main()", "run", experiment]


def environment(home: Path, places: tuple[Path, ...]) -> dict[str, str]:
    return {**os.environ, "ASSAY_HOME": str(home), "ASSAY_EXPERIMENTS": os.pathsep.join(map(str, places))}


def kill_at_random(experiment: str, *, home: Path, places: tuple[Path, ...], kills: int, longest: float, seed: int = 0) -> int:
    """Start the run ``kills`` times and kill each after a random time of at most ``longest`` seconds; how many were still alive then."""
    chance, alive = random.Random(seed), 0
    for number in range(kills):
        process = subprocess.Popen(
            command(experiment), env=environment(home, places), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        wait = chance.uniform(0.5, longest)
        try:
            process.wait(timeout=wait)
        except subprocess.TimeoutExpired:
            alive += 1
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        print(f"kill {number + 1} of {kills} after {wait:.1f} s", flush=True)
    return alive


def faults(experiment: str, *, home: Path, places: tuple[Path, ...]) -> list[str]:
    """Run once more to the end; everything that is wrong afterwards."""
    done = subprocess.run(command(experiment), env=environment(home, places), capture_output=True, text=True)
    found = [f"the plain run after the kills ended with {done.returncode}: {done.stderr[-2000:]}"] if done.returncode else []
    bench = Workspace(home, (*places, OWN_EXPERIMENTS))
    graph = build_graph(bench.experiment(experiment))
    items = plan(Ledger(bench, graph))
    found += [f"not built: {'/'.join(item.key.path)}" for item in missing(items)]
    found += [f"damaged: {problem}" for problem in bench.store.verify()]
    found += [f"left behind: {path}" for path in (bench.store.root / "tmp").iterdir()]
    connection = connect(bench.facts.root)
    found += [f"doubled: {row}" for row in connection.sql(DOUBLED).fetchall()]
    rows = connection.sql(
        "SELECT DISTINCT variant, suite FROM fact WHERE experiment = $name AND value IS NOT NULL", params={"name": experiment}
    ).fetchall()
    facts = set(rows)
    found += [f"lost: {item.kind} of {item.variant.slug}" for item in items if item.variant and (item.variant.slug, item.kind) not in facts]
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--experiment", default="quickstart")
    options.add_argument("--home", type=Path, required=True)
    options.add_argument("--place", type=Path, action="append", default=[])
    options.add_argument("--kills", type=int, default=50)
    options.add_argument("--longest", type=float, default=40.0, help="seconds after which a run is killed at the latest")
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args()
    began, places = time.monotonic(), tuple(asked.place)
    alive = kill_at_random(asked.experiment, home=asked.home, places=places, kills=asked.kills, longest=asked.longest, seed=asked.seed)
    found = faults(asked.experiment, home=asked.home, places=places)
    print("\n".join(found))
    print(f"{alive} of {asked.kills} runs were killed alive; {len(found)} faults; {time.monotonic() - began:.0f} s")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
