package main

import (
	"fmt"
	"os"
	"sort"
	"strings"
	"time"
)

//go:noinline
func down(left int, x uint64) uint64 {
	if left == 0 {
		for i := 0; i < 2000; i++ {
			x = x*6364136223846793005 + 1442695040888963407
		}
		return x
	}
	return down(left-1, x+uint64(left)) ^ uint64(left)
}

func words(n int) int {
	counts := map[string]int{}
	for i := 0; i < n; i++ {
		for _, w := range strings.Fields(fmt.Sprintf("a%d b%d c%d", i%7, i%11, i)) {
			counts[w]++
		}
	}
	keys := make([]string, 0, len(counts))
	for k := range counts {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return len(keys)
}

func main() {
	end := time.Now().Add(14 * time.Second)
	results := make(chan uint64)
	go func() {
		x := uint64(1)
		for time.Now().Before(end) {
			x += down(40, x)
		}
		results <- x
	}()
	n := 0
	for time.Now().Before(end) {
		n += words(1000)
	}
	fmt.Fprintln(os.Stderr, <-results, n)
}
