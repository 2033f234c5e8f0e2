"""Runs the command line in this process and gives back exit code, stdout and stderr."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from transcode.cli import main


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str


def run(*args: str | Path) -> Ran:
    """`transcode ARGS`; an exception that the command line does not catch fails the test."""
    result = CliRunner().invoke(main, [str(a) for a in args], catch_exceptions=False)
    return Ran(result.exit_code, result.stdout, result.stderr)


def pack(source: Path, target: Path, *options: str) -> Path:
    """Convert to marlin-nvfp4 and verify from disk; both must exit 0."""
    ran = run("convert", "--to", "marlin-nvfp4", *options, source, target)
    assert ran.code == 0, ran.err
    proved = run("verify", source, target)
    assert proved.code == 0, proved.out + proved.err
    return target
