"""Reads when and with what Megatron-LM's golden values were recorded, from a clone with its history.

``python benchmarks/read_golden_records.py CLONE OUT.csv`` (5 minutes) writes the rows of
``validation/board/measurements/megatron_records.csv`` for the golden values at commit d98e8a6. The iteration times of a
file are from the oldest commit since which they have not changed; the tests used the container at that commit.
Flags without an effect on times or memory are left out.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import quantiles
from typing import Any

import yaml

_COMMIT = "d98e8a6"
_CASES = "tests/functional_tests/test_cases"
_NAME = re.compile(r"golden_values_(.+)\.json")
_LAST = 20
"""Steps at the end that are compared: leading ones without a time were removed later."""
_WITHOUT_EFFECT = re.compile(
    r"--(vocab-file|merge-file|data-path|load|save.*|tensorboard-dir|tokenizer-type|async.*|use-persistent-ckpt-worker|"
    r"verify-integrity|dist-ckpt-.*|no-ckpt.*|wandb.*|exit-interval|eval-.*|train-samples|step-batch.*|"
    r"cuda-graph-(scope|modules))|PYTORCH_CUDA_ALLOC_CONF|NON_DETERMINSTIC_RESULTS|SKIP_PYTEST|N_REPEATS|NCCL_IB_.*"
)
_GPT2_VOCABULARY = 50257


def _git(clone: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(clone), *arguments], capture_output=True, text=True, check=False).stdout


def _steps(clone: Path, commit: str, path: str) -> list[float]:
    try:
        content = json.loads(_git(clone, "show", f"{commit}:{path}"))
    except ValueError:
        return []
    times = content.get("iteration-time") or content.get("iteration_timing_avg")
    values = times.get("values", []) if isinstance(times, dict) else []
    listed = values.values() if isinstance(values, dict) else values
    return [value for value in listed if isinstance(value, int | float) and value == value]


def _recorded(clone: Path, path: str, steps: list[float]) -> tuple[str, str, str]:
    """Return the commit, the date and the path that a file's iteration times are from."""
    found, commit, date = ("", "", path), "", ""
    log = _git(clone, "log", "--follow", "--name-status", "--format=@%h %ad", "--date=short", _COMMIT, "--", path)
    for line in log.splitlines():
        if line.startswith("@"):
            commit, date = line[1:].split()
        elif line.strip():
            before = line.split("\t")[-1]
            if _steps(clone, commit, before)[-_LAST:] != steps[-_LAST:]:
                break
            found = commit, date, before
    return found


def _settings(clone: Path, commit: str, path: str) -> dict[str, Any]:
    text = _git(clone, "show", f"{commit}:{path.rpartition('/')[0]}/model_config.yaml")
    content = yaml.safe_load(text) if text else {}
    return {**(content.get("MODEL_ARGS") or {}), **(content.get("ENV_VARS") or {})}


def _changed(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    for key in sorted({*before, *now}):
        pair = before.get(key), now.get(key)
        if pair[0] != pair[1] and not _WITHOUT_EFFECT.fullmatch(key) and pair != (None, _GPT2_VOCABULARY):
            yield key


@cache
def _container(clone: Path, commit: str, kind: str) -> str:
    text = _git(clone, "show", f"{commit}:docker/.ngc_version.{kind}")
    if not text:
        build = _git(clone, "show", f"{commit}:.gitlab/stages/01.build.yml")
        part = build.partition(f"CI_MCORE_{kind.upper()}_IMAGE")[2]
        text = part.partition("-py3")[0]
    match = re.search(r"pytorch:([\d.]+)", text)
    return match.group(1) if match else ""


def main() -> None:
    """Write the table."""
    clone, rows = Path(sys.argv[1]), []
    for path in _git(clone, "ls-tree", "-r", "--name-only", _COMMIT, _CASES).split():
        case, name = path.split("/")[-2:]
        match, steps = _NAME.fullmatch(name), _steps(clone, _COMMIT, path)
        if match is None or len(steps) < 3:
            continue
        machine = match.group(1)
        commit, date, before = _recorded(clone, path, steps)
        flags = _changed(_settings(clone, commit, before), _settings(clone, _COMMIT, path))
        low, middle, high = quantiles(sorted(steps[1:]), n=4)
        container = _container(clone, commit, "lts" if machine.startswith("lts") else "dev")
        rows.append((case, machine, commit, date, container, " ".join(flags), f"{(high - low) / middle:.3f}"))
    with Path(sys.argv[2]).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("case", "machine", "commit", "date", "container", "changed", "spread"))
        writer.writerows(sorted(rows))


if __name__ == "__main__":
    main()
