// Recursion of a known depth in compiled code: 41 calls of `down` below `run`.
public class Recurse {
    public static long down(int left, long x) {
        if (left == 0) {
            for (int i = 0; i < 2000; i++) x = x * 6364136223846793005L + 1442695040888963407L;
            return x;
        }
        return down(left - 1, x + left) ^ left;
    }

    public static void main(String[] args) {
        long end = System.nanoTime() + 14_000_000_000L, x = 1;
        while (System.nanoTime() < end) for (int i = 0; i < 100; i++) x += down(40, x);
        System.out.println(x);
    }
}
