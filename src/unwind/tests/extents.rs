//! Where functions of x86-64 begin and end, as far as the analysis of their instructions must know it.

use super::*;

#[test]
fn functions_without_a_size_end_where_they_return() {
    // push %rbx; nop; pop %rbx; ret; then another function without a symbol: xor %eax,%eax; ret
    let code = vec![0x53, 0x90, 0x5b, 0xc3, 0x31, 0xc0, 0xc3];
    let mut unwinder = unwinder(File {
        code,
        functions: vec![(0x1000, 0)],
        ..File::default()
    });
    let mut at = |offset: u64| unwinder.explain(ModuleId(0), 0x1000 + offset).unwrap_or_default();
    assert_eq!(at(1), "rsp+16 ra=c-8 code");
    assert_eq!(at(4), "rsp+8 ra=c-8 code");
    assert_eq!(at(6), "rsp+8 ra=c-8 code");
}

#[test]
fn functions_without_a_size_do_not_reach_others() {
    // push %rbx; jmp *%rax; padding; then functions without symbols: push %rbp; pop %rbp; ret, to which nothing points,
    // and the same, whose address the last one loads.
    let other = [0x55, 0x5d, 0xc3];
    let mut code = vec![0x53, 0xff, 0xe0];
    code.resize(0x10, 0x90);
    code.extend(other);
    code.resize(0x1f, 0x90);
    code.push(0xc3);
    code.extend(other);
    code.extend(b"\x48\x8d\x3d\xf6\xff\xff\xff\xc3"); // lea 0x1020(%rip),%rdi; ret
    let mut unwinder = unwinder(File {
        code,
        functions: vec![(0x1000, 0)],
        ..File::default()
    });
    let mut at = |offset: u64| unwinder.explain(ModuleId(0), 0x1000 + offset).unwrap_or_default();
    assert_eq!(at(1), "rsp+16 ra=c-8 code");
    assert_eq!(at(0x10), "rsp+8 ra=c-8 code");
    assert_eq!(at(0x20), "rsp+8 ra=c-8 code");
    assert_eq!(at(0x21), "rsp+16 ra=c-8 code");
}

#[test]
fn functions_begin_after_calls_that_do_not_return() {
    let rule = |then: &[u8]| {
        // push %rax; call; padding up to 0x1010
        let mut code = vec![0x50, 0xe8, 0, 0x10, 0, 0];
        code.resize(0x10, 0x90);
        code.extend(then);
        let mut unwinder = unwinder(File {
            code,
            ..File::default()
        });
        unwinder.explain(ModuleId(0), 0x1010)
    };
    // xor %eax,%eax; ret
    assert_eq!(rule(&[0x31, 0xc0, 0xc3]).as_deref(), Some("rsp+8 ra=c-8 code"));
    // A loop of the same function: 1: dec %eax; jne 1b; pop %rcx; ret
    let body = rule(&[0xff, 0xc8, 0x75, 0xfc, 0x59, 0xc3]);
    assert_eq!(body.as_deref(), Some("rsp+16 ra=c-8 code"));
}
