//! An object that `LD_PRELOAD` loads hooks a C program and Python.

mod common;

use std::path::Path;
use std::process::Command;

use common::{built_object, compiled};

/// Allocates as many blocks as its argument says: half of them in a library that it loads, and as many again in a child.
const PROGRAM: &str = r#"
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
int main(int count, char **arguments) {
    int blocks = atoi(arguments[1]);
    void *library = dlopen(arguments[2], RTLD_NOW);
    void (*allocate)(int) = (void (*)(int))dlsym(library, "allocate");
    for (int i = 0; i < blocks / 2; i++)
        *(void *volatile *)malloc(sizeof(void *)) = 0;
    allocate(blocks / 2);
    pid_t child = fork();
    if (child == 0) {
        allocate(blocks);
        exit(0);
    }
    int status;
    return waitpid(child, &status, 0) != child || status != 0 || count != 3;
}
"#;

const LIBRARY: &str = r#"
#include <stdlib.h>
void allocate(int blocks) {
    for (int i = 0; i < blocks; i++)
        *(void *volatile *)calloc(1, sizeof(void *)) = 0;
}
"#;

/// The blocks that the object has counted in a program.
fn counted(object: &Path, program: &mut Command) -> u64 {
    let output = program.env("LD_PRELOAD", object).output().expect("the program runs");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    let lines: Vec<&str> = text.lines().filter(|l| l.starts_with("count_allocations: ")).collect();
    assert_eq!(lines.len(), 1, "{text}");
    let blocks = lines[0].split_whitespace().nth(1).and_then(|word| word.parse().ok());
    blocks.unwrap_or_else(|| panic!("{text}"))
}

#[test]
fn a_preloaded_object_counts_what_a_program_allocates() {
    let object = built_object("count_allocations");

    let program = compiled("allocates", PROGRAM, &[], &[]);
    let library = compiled("liballocates.so", LIBRARY, &["-shared", "-fPIC"], &[]);
    let blocks = |number: &str| counted(&object, Command::new(&program).arg(number).arg(&library));
    // The loader and the C library allocate, too. The child's blocks are not counted.
    assert_eq!(blocks("5000") - blocks("1000"), 4000);

    // Too large for Python's own allocator, so each is a block of the C library's; the list grows by some reallocs.
    let script = "import sys; blocks = [bytes(5000) for _ in range(int(sys.argv[1]))]";
    // `python3` may be a script that looks for the interpreter.
    let found = Command::new("python3")
        .args(["-c", "import sys; print(sys.executable)"])
        .output()
        .expect("python3");
    let interpreter = String::from_utf8_lossy(&found.stdout).trim().to_string();
    let blocks = |number: &str| {
        let mut python = Command::new(&interpreter);
        python.args(["-S", "-c", script, number]).env("PYTHONHASHSEED", "0");
        counted(&object, &mut python)
    };
    let more = blocks("5000") - blocks("1000");
    assert!((4000..4200).contains(&more), "{more}");
}
