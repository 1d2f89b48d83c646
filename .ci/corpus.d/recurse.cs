using System;

class Recurse {
    static long Down(int left, long x) {
        if (left == 0) {
            for (int i = 0; i < 2000; i++) x = x * 6364136223846793005L + 1442695040888963407L;
            return x;
        }
        return Down(left - 1, x + left) ^ left;
    }

    static void Main() {
        var end = DateTime.UtcNow.AddSeconds(14);
        long x = 1;
        while (DateTime.UtcNow < end)
            for (int i = 0; i < 100; i++) x += Down(40, x);
        Console.WriteLine(x);
    }
}
