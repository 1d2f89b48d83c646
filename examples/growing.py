"""A service whose memory grows: it keeps the rows of each report, which are not used again.

    python3 examples/growing.py &
    sudo nativeprof heap $! -o heap.html
    sudo nativeprof attach $! --mode rss -d 30 -o growth.html

`python3 -m nativeprof --alloc examples/growing.py --once` ends after a hundred reports.
"""
import json
import sys
import time


class Report:
    def __init__(self, number, rows):
        self.number = number
        self.rows = rows
        self.text = json.dumps(rows)


REPORTS = {}


def load_rows(number):
    return [{"id": number + n, "name": f"article {n}", "price": n / 7} for n in range(1000)]


def report(number):
    if number not in REPORTS:
        REPORTS[number] = Report(number, load_rows(number))
    return REPORTS[number].text


def compress(text):
    # Large buffers that come and go.
    return len(text.encode() * 20)


def main():
    number = 0
    while number < 100 or "--once" not in sys.argv:
        compress(report(number))
        number += 1
        if "--once" not in sys.argv:
            time.sleep(0.05)


main()
