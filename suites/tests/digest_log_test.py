"""Logs that Python writes, compared by the program: digest_log_test.py PROGRAM SOURCE FOLDER.

A stand-in has what the log asks of a tensor of PyTorch, so that none is needed. Ends with 77 where
there is no C compiler.
"""
import array
import os
import shlex
import shutil
import subprocess
import sys

program, source, folder = sys.argv[1:]
sys.path.insert(0, os.path.join(source, "fixtures/torch"))
from digest_log import DigestLog


class Tensor:
    dtype = "torch.float32"

    def __init__(self, values, shape):
        self.values, self.shape = array.array("f", values), shape

    detach = contiguous = cpu = lambda self: self

    def data_ptr(self):
        return self.values.buffer_info()[0]


def drift(code, *logs):
    ended = subprocess.run([program, "drift", "--logs", *logs], capture_output=True, text=True)
    assert ended.returncode == code, f"expected exit {code} of {logs}, met {ended.returncode}: {ended.stdout}{ended.stderr}"
    return ended.stdout


def log(name, ranks, change=None):
    """w [4,6] cut by columns, which are no run of the whole, over `ranks`; a copy of gamma on each."""
    whole, columns = [float(i) for i in range(24)], 6 // ranks
    path = os.path.join(folder, name)
    written = DigestLog(path)
    for r in range(ranks):
        own = [whole[6 * row + r * columns + c] for row in range(4) for c in range(columns)]
        gamma = [1.0] * 6
        if change == "w" and r == ranks - 1:
            own[-1] += 2 ** -18
        if change == "gamma" and r == ranks - 1:
            gamma[4] = 2.0
        written.write(0, "init", "w", Tensor(own, (4, columns)), f"tp:S{ranks}", str(r), (4, 6), (0, r * columns))
        written.write(0, "init", "gamma", Tensor(gamma, (6,)), f"tp:I{ranks}", str(r))
    return path


def refused(error, *arguments, **words):
    try:
        DigestLog(os.path.join(folder, "refused.log")).write(0, "init", "w", *arguments, **words)
    except error as e:
        assert "w: expected" in str(e), e
        return
    raise AssertionError(f"expected {error.__name__}, met none")


if not shutil.which(shlex.split(os.environ.get("CC", "cc"))[0]):
    print("no C compiler: skipped")
    sys.exit(77)
os.makedirs(folder, exist_ok=True)
two, three = log("two.log", 2), log("three.log", 3)
drift(0, two)
drift(0, two, three)  # the shards of any layout add up to the same
assert "tensor w" in drift(1, two, log("value.log", 3, "w"))
assert "tensor gamma, tp=1" in drift(1, log("copies.log", 2, "gamma"))
block = Tensor([0.0] * 6, (2, 3))
refused(ValueError, block, "tp:S2", "0", shape=(2, 4), start=(0, 2))  # beyond the whole
refused(ValueError, block, "tp:S2", "0", shape=(12,))
for rank in ("", "0, 1", (0, 1)):
    refused(ValueError, block, "tp:S2,dp:I2", rank)
for nothing in (None, 1.0):  # such as the gradient of what no backward has reached
    refused(TypeError, nothing, "tp:I2", "0")
DigestLog(os.path.join(folder, "number.log")).write(0, "init", "w", block, "tp:I1", 0)
block.to_local = lambda: block  # a DTensor: memory is shorter than shape says
refused(TypeError, block, "tp:S2", "0")
del block.to_local
block.dtype = "torch.bool"
refused(TypeError, block, "tp:I2", "0")
