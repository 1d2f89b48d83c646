"""A few seconds of ordinary work that goes back and forth between Python and C."""
import hashlib
import json
import re
import sqlite3
import sys
import time
import zlib


def clean(match):
    return match.group(0).title()


def rank(row):
    return len(row["name"]) * 31 % 97, row["name"]


def texts(rows):
    pattern = re.compile(r"\b[a-z]{3,}\b")
    return [pattern.sub(clean, row["text"]) for row in rows]


def ordered(rows):
    return sorted(rows, key=rank)


class Average:
    """An aggregate that sqlite calls for each row."""

    def __init__(self):
        self.total = self.count = 0

    def step(self, value):
        self.total += value * value % 7
        self.count += 1

    def finalize(self):
        return self.total / max(1, self.count)


def query(rows):
    db = sqlite3.connect(":memory:")
    db.create_aggregate("average", 1, Average)
    db.execute("create table t (name text, value integer)")
    db.executemany("insert into t values (?, ?)", [(r["name"], r["value"]) for r in rows])
    return db.execute("select substr(name, 1, 2), average(value) from t group by 1 order by 2").fetchall()


def encode(rows):
    text = json.dumps(rows, default=str).encode()
    return hashlib.sha256(zlib.compress(text, 6)).hexdigest()


def main(seconds):
    rows = [{"name": "name%05d" % (i * 7919 % 10007), "value": i, "text": "some text number %d of many" % i} for i in range(4000)]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        texts(rows)
        ordered(rows)
        query(rows)
        encode(rows)


main(float(sys.argv[1]) if len(sys.argv) > 1 else 4.0)
