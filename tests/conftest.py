"""Set before jax is first imported: eight CPU devices, so that everything about meshes is tested on any machine.

`DREAMER_TEST_PLATFORM=cuda python -m pytest -m gpu` runs the tests that need a GPU on one instead.
"""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from importlib.metadata import version

import pytest
from hypothesis import settings

DEVICES = "--xla_force_host_platform_device_count"
# Compiling is most of the tests' time. LLVM's optimisations, and fusions that go through MLIR, each double it; cutting
# a program into parts, to be compiled side by side, adds a tenth. From jaxlib 0.11 on there is no other way to make
# fusions, and XLA ends a process that has a flag it doesn't know.
QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
QUICK_COMPILE += " --xla_cpu_parallel_codegen_split_count=1"
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    QUICK_COMPILE += " --xla_cpu_use_fusion_emitters=false"

os.environ["JAX_PLATFORMS"] = os.environ.get("DREAMER_TEST_PLATFORM", "cpu")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes of a parallel run share a GPU
if DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}=8".strip()
if os.environ["JAX_PLATFORMS"] == "cpu" and "optimization_level" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += f" {QUICK_COMPILE}"

# What `dreamer` has compiled as a process is there for the next one, in a folder of this run of the tests: the user's
# is neither filled nor read. The processes of pytest themselves keep nothing.
CACHES = "DREAMER_TEST_CACHES"
if CACHES not in os.environ:  # else a process of a parallel run
    os.environ[CACHES] = tempfile.mkdtemp(prefix="dreamer-tests-")
    atexit.register(shutil.rmtree, os.environ[CACHES], ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = os.environ[CACHES]

# Tracing makes millions of small objects that live long; Python's collector would look at them again and again.
gc.set_threshold(200_000)

# A shared machine's pace says nothing about the code, and a failure should come again.
settings.register_profile("dreamer", deadline=None, derandomize=True)
settings.load_profile("dreamer")


LONGEST = (
    "test_notebooks",
    "test_kills",
    "test_documentation",
    "test_train",
    "test_memory",
    "test_meshes",
    "test_sampling",
)


def pytest_collection_modifyitems(items):
    """The longest files first, so that no process is left with one of them at the end of a parallel run."""
    mark_cases(items)
    items.sort(key=lambda item: item.path.stem not in LONGEST)


def mark_cases(items):
    """What `slow_but` says of the cases of a test: a word is the name of one, or else a part of several names."""
    cases = {}
    for item in items:
        if item.get_closest_marker("slow_but"):
            cases.setdefault(item.nodeid.partition("[")[0], {})[item.callspec.id] = item
    for test, its in cases.items():
        quick = set()
        for word in next(iter(its.values())).get_closest_marker("slow_but").args:
            meant = {word} & its.keys() or {name for name in its if word in name}
            if not meant and len(its) > 1:  # one alone was asked for by its name
                raise pytest.UsageError(f"{test}: slow_but names {word!r}, which no case has in its name")
            quick |= meant
        for name in its.keys() - quick:
            if not any(map(its[name].get_closest_marker, ("gpu", "aot", "llama3"))):  # nor does `-m slow` run those
                its[name].add_marker("slow")


@pytest.fixture(scope="module", autouse=True)
def programs_are_freed():
    """Compiled programs are memory maps, and a process may have 65,530 of them: LLVM crashes when they run out.

    Freed when there are many, not after every file: the next would compile its small operations anew.
    """
    yield
    jax = sys.modules.get("jax")
    if jax is not None and hasattr(jax, "clear_caches") and _memory_maps() > MANY_MAPS:
        jax.clear_caches()
        gc.collect()


MANY_MAPS = 4_000
"""With 7,000 a process had 5 GB."""


def _memory_maps() -> int:
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps)
    except OSError:  # not Linux: nothing is known
        return MANY_MAPS + 1
