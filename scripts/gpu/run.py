#!/usr/bin/env python3
"""Checks and measures Flow on this machine's GPU, without Rust; torch 2.11 with CUDA must be there for `python3`.

Writes DIR/gpu-results.md, whose short form is docs/gpu-results.md, results.json, timelines, and log.txt with all that was
printed. Checks and benches may run one after the other, in two commands with one DIR.
"""

import argparse
import datetime
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from time import monotonic

import report
from benches import benches
from checks import checks
from programs import BUNDLE, CannotRun, Failed, Programs, driver, probe


def pattern(text):
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error


def parse():
    parser = argparse.ArgumentParser(
        prog="run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="checks|bench", help="what to run (default: both)")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), metavar="DIR", help="default: ./gpu-results")
    parser.add_argument("--quick", action="store_true", help="fewer steps, models and rounds")
    parser.add_argument("--only", metavar="REGEX", type=pattern, default="", help="only what has this in its name")
    parser.add_argument(
        "--at-a-time", type=int, default=2, metavar="N", help="checks that run at once: most of one is its start (default: 2)"
    )
    parser.add_argument("--limit", type=int, default=300, metavar="SECONDS", help="for one program (default: 300)")
    parser.add_argument("--python", default="python3", help="the interpreter with torch (default: python3)")
    parser.add_argument(
        "--rehearse",
        type=Path,
        metavar="FAKES",
        help="try this program without a GPU, on the tests' fakes of the driver and NCCL in that folder",
    )
    arguments = parser.parse_args()
    unknown = [part for part in arguments.parts if part not in ("checks", "bench")]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}: checks, bench")
    return arguments


def run_one(programs, item, function):
    start = monotonic()
    try:
        result = function(programs)
        item["outcome"] = "ok"
        if isinstance(result, str):
            item["detail"] = result
        else:
            item["rows"], item["timelines"] = result
    except CannotRun as error:
        item.update(outcome="could not run", detail=str(error))
    except Failed as error:
        item.update(outcome="FAILED", detail=str(error))
    except Exception as error:  # output of another form than expected, a missing file: the others still run
        item.update(outcome="FAILED", detail=f"{type(error).__name__}: {error}")
    item["seconds"] = round(monotonic() - start, 1)
    return item


def run_part(programs, functions, at_a_time, items, save):
    with ThreadPoolExecutor(at_a_time) as pool:
        try:
            started = [pool.submit(run_one, programs, item, function) for item, function in zip(items, functions)]
            for item in (future.result() for future in as_completed(started)):
                print(f"{item['name']}: {report.outcome(item)} ({item['seconds']} s)", flush=True)
                for row in item.get("rows", []):
                    print("    " + "  ".join(filter(None, row)), flush=True)
                save()
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            programs.stop_all()
            raise


def earlier(out, commit, rehearsal):
    """The parts of an earlier run of the same bundle."""
    try:
        results = json.loads((out / "results.json").read_text())
    except (OSError, ValueError):
        return {}
    return results["parts"] if (results["commit"], results["rehearsal"]) == (commit, rehearsal) else {}


def main():
    arguments = parse()
    rehearsal = arguments.rehearse is not None
    about = json.loads((BUNDLE / "about.json").read_text())
    try:
        torch = probe(arguments.python)
        if not torch["gpus"] and not rehearsal:
            raise CannotRun("torch sees no GPU here (nvidia-smi shows what the driver sees)")
    except CannotRun as error:
        sys.exit(f"run: error: {error}")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    fakes = arguments.rehearse.resolve() if rehearsal else None
    programs = Programs(arguments.python, torch, fakes, out, arguments.limit)

    device = "none, fakes" if rehearsal else f"{len(torch['gpus'])} x {torch['gpus'][0]}"
    machine = {**torch, "device": device, "driver": driver(), "cores": os.cpu_count()}
    del machine["folders"]
    results = {
        "rehearsal": rehearsal,
        "commit": about["commit"],
        "machine": machine,
        "parts": earlier(out, about["commit"], rehearsal),
    }
    if rehearsal:
        print("A rehearsal on fakes: no GPU result.")
    print(f"{device}, driver {machine['driver']}; torch {torch['torch']}, NCCL {torch['nccl']}; Flow {about['commit']}")
    failed = 0
    for part in arguments.parts or ["checks", "bench"]:
        programs.compare_exactly(part == "checks")
        listed = list(checks(about, arguments.quick) if part == "checks" else benches(arguments.quick, rehearsal))
        before = {item["name"]: item for item in results["parts"].get(part, {}).get("items", [])}
        if part == "bench":  # what is left out is reported as well
            listed += [(name, None) for name, _ in benches(False, False) if name not in dict(listed)]
        chosen = [(name, function) for name, function in listed if function and arguments.only.search(name)]
        fresh = {name: {"name": name, "outcome": "not run"} for name, _ in chosen}
        items = [fresh.get(name) or before.get(name) or {"name": name, "outcome": "not run"} for name, _ in listed]
        options = ["--quick"] * arguments.quick + [f"--only '{arguments.only.pattern}'"] * bool(arguments.only.pattern)
        results["parts"][part] = {
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["scripts/gpu-check's run", part, *options]),
            "items": items,
        }
        report.write(out, results)
        at_a_time = arguments.at_a_time if part == "checks" and not rehearsal else 1
        functions = [function for _, function in chosen]
        run_part(programs, functions, at_a_time, list(fresh.values()), lambda: report.write(out, results))
        failed += sum(item["outcome"] == "FAILED" for item in fresh.values())
    print(f"{out / 'gpu-results.md'} is written; {failed or 'nothing'} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.stderr.write("run: interrupted\n")
        sys.stderr.flush()
        os._exit(130)
