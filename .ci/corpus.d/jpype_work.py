"""Java called by Python, in one process."""
import sys
import time

import jpype

jpype.startJVM("-XX:+PreserveFramePointer", classpath=[sys.argv[1]])
Recurse = jpype.JClass("Recurse")
lists = jpype.JClass("java.util.ArrayList")
end = time.monotonic() + 12
while time.monotonic() < end:
    items = lists()
    for i in range(300):
        items.add(str(i * 7919 % 300))
    jpype.java.util.Collections.sort(items)
    x = 1
    for _ in range(2000):
        x = int(Recurse.down(40, x)) & 0xFFFF
