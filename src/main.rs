use std::process::ExitCode;

fn main() -> ExitCode {
    nativeprof::cli::main()
}
