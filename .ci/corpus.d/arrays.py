"""What one library of arrays or tables is used for; its name is the argument."""
import sys
import time


def numpy():
    import numpy as np

    a = np.random.default_rng(1).random((400, 400))
    return lambda: np.linalg.svd(a @ a)[0].sum()


def pandas():
    import pandas as pd

    frame = pd.DataFrame({"a": range(100000), "b": [i * 7919 % 1000 for i in range(100000)]})
    return lambda: frame.groupby("b").a.agg(["mean", "std", "max"]).sort_values("mean")


def polars():
    import polars as pl

    frame = pl.DataFrame({"a": range(200000), "b": [i * 7919 % 1000 for i in range(200000)]})
    return lambda: frame.group_by("b").agg(pl.col("a").mean(), pl.col("a").std().alias("s")).sort("a")


def pyarrow():
    import pyarrow as pa
    import pyarrow.compute as pc

    table = pa.table({"a": list(range(200000)), "b": [str(i * 7919 % 1000) for i in range(200000)]})
    return lambda: table.group_by("b").aggregate([("a", "mean")]).sort_by("b").num_rows + pc.sum(table["a"]).as_py()


work = globals()[sys.argv[1]]()
end = time.monotonic() + 14
while time.monotonic() < end:
    work()
