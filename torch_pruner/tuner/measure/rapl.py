"""The meter of x86 CPUs: RAPL, through Linux's powercap folder.

Every package has a folder ``intel-rapl:N`` (AMD's too) with ``energy_uj``, a counter in microjoules
that begins anew after ``max_energy_range_uj``. Since it tells what others compute (CVE-2020-8694)
Linux lets only root read it, unless its mode is changed. Source:
docs.kernel.org/power/powercap/powercap.html.
"""

from __future__ import annotations

import re
from pathlib import Path

from torch_pruner.exc import MeterError
from torch_pruner.tuner.measure.meter import Meter

POWERCAP = "/sys/class/powercap"
_PACKAGE = re.compile(r"intel-rapl:\d+")
_READABLE = "let this user read it (as root: `chmod a+r {}`), or run as root"


class RaplMeter(Meter):
    """Joules of all packages of this machine: cores, caches and what lies around them."""

    name = "RAPL"
    period_s = 0.001

    def __init__(self, root: str = "") -> None:
        """``root``: the powercap folder, if it is another than Linux's."""
        folder = Path(root or POWERCAP)
        if not folder.is_dir():
            reason = f"there is no {folder}: the system has no RAPL, or hides it"
            raise MeterError(self.name, reason, "virtual machines and containers mostly do")
        self._packages = [_Package(found) for found in _packages(folder)]
        if not self._packages:
            reason = f"{folder} has no package of a CPU"
            fix = "load the module intel_rapl_msr; virtual machines have none"
            raise MeterError(self.name, reason, fix)
        self.joules()

    def joules(self) -> float:
        return sum(package.joules() for package in self._packages)


def _packages(folder: Path) -> list[Path]:
    """Folders of packages: not those of their parts, nor of the platform, which holds them."""
    found = sorted(entry for entry in folder.iterdir() if _PACKAGE.fullmatch(entry.name))
    return [entry for entry in found if _text(entry / "name").startswith("package")]


class _Package:
    """One counter, made to go on where it begins anew."""

    def __init__(self, folder: Path) -> None:
        self._counter = folder / "energy_uj"
        self._range = _number(folder / "max_energy_range_uj")
        self._last = _number(self._counter)
        self._total = 0

    def joules(self) -> float:
        now = _number(self._counter)
        more = now - self._last
        self._total += more if more >= 0 else more + self._range
        self._last = now
        return self._total * 1e-6


def _number(path: Path) -> int:
    text = _text(path)
    if not text.isdecimal():
        raise MeterError(RaplMeter.name, f"{path} holds {text[:40]!r} and no number")
    return int(text)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except PermissionError as err:
        raise MeterError(RaplMeter.name, f"{path} {err.strerror}", _READABLE.format(path)) from err
    except OSError as err:
        raise MeterError(RaplMeter.name, f"{path}: {err.strerror}") from err
