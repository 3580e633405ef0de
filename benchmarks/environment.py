"""What a result depends on beside the code: written beside every result."""

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

import pslayers as ps

PACKAGES = ("torch", "einops", "opacus", "backpack-for-pytorch", "torchjd", "numpy")


def environment() -> dict[str, Any]:
    """Versions, processor, memory, threads, and what settings of torch matter."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "pslayers": ps.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _from_file("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.processor(),
        "processor_family": _from_file("/proc/cpuinfo", r"cpu family\s*:\s*(\d+)"),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(int(_from_file("/proc/meminfo", r"MemTotal:\s+(\d+)") or 0) / 2**20, 1),
        "load_at_start": round(os.getloadavg()[0], 2),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "tf32": {
            "matmul": torch.backends.cuda.matmul.allow_tf32,
            "convolution": torch.backends.cudnn.allow_tf32,
        },
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _from_file(path: str, pattern: str) -> str | None:
    found = re.search(pattern, Path(path).read_text()) if Path(path).exists() else None
    return found.group(1).strip() if found else None


def _commit() -> str | None:
    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        but_results = ":/", ":(top,exclude)benchmarks/results"
        changed = git("status", "--porcelain", "-uno", "--", *but_results)
        return git("rev-parse", "--short", "HEAD") + (" and changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
