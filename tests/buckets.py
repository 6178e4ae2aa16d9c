"""A bucket of Google Cloud on this machine, which TensorStore and gcsfs take for the real one."""

import atexit
import functools
import importlib.util
import os
import socket
import subprocess
import sys
import time

import pytest


@functools.cache
def bucket() -> str:
    """The URL of a bucket, empty at first, of a server that ends with this process. Those begun later see it, too."""
    if not all(map(importlib.util.find_spec, ("gcp_storage_emulator", "gcsfs"))):
        pytest.skip("gcp-storage-emulator and gcsfs are not installed")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = ["-m", "gcp_storage_emulator", "start", "--in-memory", "--default-bucket", "bucket", "--port", str(port)]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = subprocess.Popen([sys.executable, *command], **quiet)
    atexit.register(server.kill)
    address = f"http://localhost:{port}"
    os.environ |= {"STORAGE_EMULATOR_HOST": address, "TENSORSTORE_GCS_HTTP_URL": address}
    os.environ |= {"GOOGLE_AUTH_TOKEN_FOR_TESTING": "token", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    for _ in range(600):
        try:
            socket.create_connection(("localhost", port)).close()
            return "gs://bucket"
        except OSError:
            time.sleep(0.05)
    raise OSError("the server of the bucket does not start")
