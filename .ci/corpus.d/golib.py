import ctypes
import sys
import time

library = ctypes.CDLL(sys.argv[1])
end = time.monotonic() + 14
while time.monotonic() < end:
    library.Work(20000)
