// Dark or light: the system's choice until the user chooses. Storage may be denied to files.
const theme = {
  system: matchMedia("(prefers-color-scheme: dark)"),
  load() {
    let kept = null;
    try {
      kept = localStorage.getItem("nativeprof-theme");
    } catch {}
    this.apply(kept === "dark" || kept === "light" ? kept : this.system.matches ? "dark" : "light");
    this.system.addEventListener("change", () => this.apply(this.system.matches ? "dark" : "light"));
  },
  apply(name) {
    document.documentElement.dataset.theme = name;
    this.changed?.();
  },
  toggle() {
    const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    this.apply(name);
    try {
      localStorage.setItem("nativeprof-theme", name);
    } catch {}
    announce(name === "dark" ? "Dark" : "Light");
  },
};
