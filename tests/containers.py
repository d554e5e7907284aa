"""What tests with containers' worth of namespaces share."""

import subprocess

import pytest

# Its process is number 1; it ends with the process that started it.
CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--uts", "--kill-child")


def require_containers() -> None:
    """Skip where this user may not make namespaces."""
    try:
        tried = subprocess.run([*CONTAINER, "true"], check=False, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if tried.returncode:
        pytest.skip(f"unshare is not permitted here: {tried.stderr.strip()}")
