"""A law with JAX as users have it: LLVM's optimisations, default products, and standard promotion of dtypes."""

import subprocess
import sys

import pytest

from tests.cases import covering_array, representative
from tests.commands import AS_USERS_RUN, ROOT


LAW = "tests/test_laws.py::test_the_fast_form_of_a_case_equals_the_plain_one"


@pytest.mark.slow
def test_a_case_is_compared_as_users_run_it():
    cases = covering_array()
    quick = (case for case in representative(cases) if case["dtype"] == "bfloat16" and case["length"] > 1)
    number = cases.index(min(quick, key=lambda case: case["mtp"]))
    environment = AS_USERS_RUN | {"AS_USERS_RUN": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{LAW}[{number}]"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "compared cases of the covering array: 1" in done.stdout
