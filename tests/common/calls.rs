//! Which function may call which in the programs that several tests run.

/// A function and what it may call; `""` is the start of the stack.
pub type Calls = &'static [(&'static str, &'static [&'static str])];

/// shares.py
pub const SHARES: Calls = &[
    ("", &["<module>"]),
    ("<module>", &["main"]),
    (
        "main",
        &[
            "run_alpha",
            "run_beta",
            "run_python",
            "run_recursion",
            "run_callback",
            "run_big",
        ],
    ),
    ("run_alpha", &["t_alpha"]),
    ("run_beta", &["t_beta"]),
    ("run_recursion", &["t_recurse"]),
    ("run_callback", &["t_call"]),
    ("run_big", &["t_big"]),
    ("t_call", &["t_bridge"]),
    ("t_big", &["t_big_frame"]),
    ("t_big_frame", &["t_bridge"]),
    ("t_bridge", &["in_callback", "in_big"]),
    ("in_callback", &["t_alpha"]),
    ("in_big", &["t_alpha"]),
    ("t_alpha", &["t_alpha_work"]),
    ("t_beta", &["t_beta_outer"]),
    ("t_beta_outer", &["t_beta_inner"]),
    ("t_recurse", &["t_recurse_step"]),
    ("t_recurse_step", &["t_recurse_step", "t_recurse_bottom"]),
];

/// callbacks.py
pub const CALLBACKS: Calls = &[
    ("", &["<module>"]),
    ("<module>", &["main"]),
    (
        "main",
        &["t_call", "by_qsort", "by_lt", "by_key", "by_reduce", "by_attribute"],
    ),
    ("t_call", &["t_bridge"]),
    (
        "t_bridge",
        &["level1", "level2", "level3", "compare", "folded", "attribute"],
    ),
    ("level1", &["t_call"]),
    ("level2", &["t_call", "t_beta"]),
    ("level3", &["t_alpha"]),
    ("by_qsort", &["t_sort"]),
    ("t_sort", &["t_compare"]),
    ("t_compare", &["t_bridge"]),
    ("compare", &["t_alpha"]),
    ("by_lt", &["__lt__"]),
    ("__lt__", &["t_alpha"]),
    ("by_key", &["key_of", "__lt__"]),
    ("key_of", &["t_alpha"]),
    ("by_reduce", &["fold"]),
    ("fold", &["t_call"]),
    ("folded", &["t_alpha"]),
    ("by_attribute", &["__getattr__"]),
    ("__getattr__", &["t_call"]),
    ("attribute", &["t_beta"]),
    ("t_alpha", &["t_alpha_work"]),
    ("t_beta", &["t_beta_outer"]),
    ("t_beta_outer", &["t_beta_inner"]),
];
