"""Whether a change leaves the machine code of all kernels as it was: instructions, registers, spills.

    python tests/same_machine_code.py REVISION [--arch 90a 80]      compares the working tree with a revision of git

Needs nvcc and cuobjdump. Kernels are matched by demangled names without namespaces and the hashes of files, so that
moving code between files and namespaces changes nothing. Exit code 1: something differs, and it says what.
"""

from __future__ import annotations

import argparse
import glob
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_COMPILED_ALONE = {"bundle_template.cu"}


def printed(*command: object, cwd: Path = ROOT) -> str:
    return subprocess.run(list(map(str, command)), cwd=cwd, check=True, capture_output=True, text=True).stdout


def tool(name: str) -> str:
    """A CUDA tool, on PATH or in a wheel of this environment."""
    wheels = glob.glob(f"{sys.prefix}/lib/python3*/site-packages/nvidia/**/bin/{name}", recursive=True)
    found = shutil.which(name) or (wheels[0] if wheels else None)
    if found is None:
        sys.exit(f"{name} was not found; install the CUDA toolkit, or: pip install nvidia-{name.replace('_', '-')}")
    return found


def kernels_of(source: Path, arch: str, folder: Path) -> dict[str, list[str]]:
    """For each kernel of a unit: its registers and memory, then its instructions."""
    cubin = folder / f"{source.stem}.{arch}.cubin"
    flags = ("-std=c++17", "-O3", "--expt-relaxed-constexpr", f"-arch=sm_{arch}", "-cubin")
    printed(tool("nvcc"), *flags, source, "-o", cubin)
    usage = re.findall(r"Function (\S+):\n\s*(.*)", printed(tool("cuobjdump"), "-res-usage", cubin))
    kernels = {name: [resources] for name, resources in usage}
    name = ""
    for line in printed(tool("cuobjdump"), "-sass", cubin).splitlines():
        start = re.match(r"\s*Function : (\S+)", line)
        if start:
            name = start[1]
        elif "/* 0x" in line:
            kernels.setdefault(name, []).append(" ".join(line.split()))
    names = printed(tool("c++filt"), *kernels).splitlines() if kernels else []
    stripped = (re.sub(r"\b\w*[0-9a-f]{8}\w*::|\(anonymous namespace\)::|\b[a-z_]\w*::", "", name) for name in names)
    return dict(zip(stripped, kernels.values(), strict=True))


def all_kernels(tree: Path, archs: list[str], folder: Path) -> dict[tuple[str, str], list[str]]:
    """All kernels of a tree, by architecture and name; units are compiled side by side."""
    sources = [path for path in sorted((tree / "kernels").glob("*.cu")) if path.name not in NOT_COMPILED_ALONE]
    folder.mkdir()
    with ThreadPoolExecutor() as pool:
        jobs = {(arch, source): pool.submit(kernels_of, source, arch, folder) for arch in archs for source in sources}
    return {(arch, name): code for (arch, _), job in jobs.items() for name, code in job.result().items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--arch", nargs="+", default=["90a", "80"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, before_tree = Path(temporary), Path(temporary) / "tree"
        printed("git", "worktree", "add", "--detach", before_tree, options.revision)
        try:
            before = all_kernels(before_tree, options.arch, folder / "before")
            after = all_kernels(ROOT, options.arch, folder / "after")
        finally:
            printed("git", "worktree", "remove", "--force", before_tree)
    differences = [f"{'gone' if key in before else 'new'}: {' '.join(key)}" for key in before.keys() ^ after.keys()]
    for key in before.keys() & after.keys():
        if before[key][0] != after[key][0]:
            differences.append(f"resources differ: {' '.join(key)}\n  {before[key][0]}\n  {after[key][0]}")
        elif before[key] != after[key]:
            differences.append(f"instructions differ: {' '.join(key)}")
    print("\n".join(sorted(differences)) or f"all {len(after)} kernels are the same")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
