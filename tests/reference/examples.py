"""How many examples a property has: a third in the default tests, all of them in `.ci/slow`."""

import os

ALL = os.environ.get("SLO_BENCH_ALL_EXAMPLES") == "1"


def examples(number: int) -> int:
    return number if ALL else number // 3
