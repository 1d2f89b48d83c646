// A library in Go that Python calls.
package main

import "C"

import (
	"sort"
	"strconv"
)

//export Work
func Work(n C.int) C.int {
	words := make([]string, 0, int(n))
	for i := 0; i < int(n); i++ {
		words = append(words, strconv.Itoa(i*7919%int(n)))
	}
	sort.Strings(words)
	return C.int(len(words[0]))
}

func main() {}
