"""Whether a change leaves the machine code of all kernels as it was: instructions, registers, spills.

    python tests/same_machine_code.py REVISION [--arch 90a 80]      compares the working tree with a revision of git

Needs nvcc and cuobjdump. Kernels are matched by demangled names without namespaces and the hashes of files, so that
moving code between files and namespaces changes nothing. Exit code 1: something differs, and it says what.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ("-std=c++17", "-O3", "--expt-relaxed-constexpr", "-cubin")
WHERE = re.compile(r"\b\w*[0-9a-f]{8}\w*::|\(anonymous namespace\)::|\b[a-z_]\w*::")  # in a demangled name


def printed(name: str, *arguments: object) -> str:
    """By a tool on PATH or in a wheel of this environment."""
    wheels = Path(sys.prefix).glob(f"lib/python3*/site-packages/nvidia/**/bin/{name}")
    tool = shutil.which(name) or next(map(str, wheels), None)
    if tool is None:
        sys.exit(f"{name} was not found; install the CUDA toolkit, or: pip install nvidia-{name.replace('_', '-')}")
    command = [tool, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def kernels_of(source: Path, arch: str, folder: Path) -> dict[str, list[str]]:
    """For each kernel of a unit: its registers and memory, then its instructions."""
    cubin = folder / f"{source.stem}.{arch}.cubin"
    printed("nvcc", *FLAGS, f"-arch=sm_{arch}", source, "-o", cubin)
    usage = re.findall(r"Function (\S+):\n\s*(.*)", printed("cuobjdump", "-res-usage", cubin))
    kernels = {name: [resources] for name, resources in usage}
    for function in printed("cuobjdump", "-sass", cubin).split("Function : ")[1:]:
        name, *lines = function.splitlines()
        kernels.setdefault(name.strip(), []).extend(" ".join(line.split()) for line in lines if "/* 0x" in line)
    names = printed("c++filt", *kernels).splitlines() if kernels else []
    return dict(zip((WHERE.sub("", name) for name in names), kernels.values(), strict=True))


def all_kernels(tree: Path, archs: list[str], folder: Path) -> dict[tuple[str, str], list[str]]:
    """All kernels of a tree, by architecture and name; units are compiled side by side."""
    sources = [path for path in sorted((tree / "kernels").glob("*.cu")) if path.name != "bundle_template.cu"]
    folder.mkdir()
    with ThreadPoolExecutor() as pool:
        jobs = {(arch, source): pool.submit(kernels_of, source, arch, folder) for arch in archs for source in sources}
    return {(arch, name): code for (arch, _), job in jobs.items() for name, code in job.result().items()}


def difference(name: str, before: list[str] | None, after: list[str] | None) -> str | None:
    if before is None or after is None:
        return f"{'new' if before is None else 'gone'}: {name}"
    if before[0] != after[0]:
        return f"resources differ: {name}\n  {before[0]}\n  {after[0]}"
    return None if before == after else f"instructions differ: {name}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--arch", nargs="+", default=["90a", "80"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, tree = Path(temporary), Path(temporary) / "tree"
        printed("git", "worktree", "add", "--detach", tree, options.revision)
        try:
            before = all_kernels(tree, options.arch, folder / "before")
            after = all_kernels(ROOT, options.arch, folder / "after")
        finally:
            printed("git", "worktree", "remove", "--force", tree)
    keys = sorted(before.keys() | after.keys())
    differences = [text for key in keys if (text := difference(" ".join(key), before.get(key), after.get(key)))]
    print("\n".join(differences) or f"all {len(after)} kernels are the same")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
