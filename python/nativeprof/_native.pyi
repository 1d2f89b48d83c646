from typing import Any, Collection, Dict, List, Optional, Sequence, Tuple

__version__: str

def create() -> Dict[str, Any]:
    """A new, empty tree."""

def process(
    frame: Any,
    child: Optional[object],
    state: Dict[str, Any],
    *,
    stop: Optional[str] = None,
    omit: Collection[str] = (),
    depth: Optional[int] = None,
) -> Optional[Dict[str, Any]]: ...
def llprocess(
    frames: Optional[List[Any]], child: Optional[object], state: Optional[Dict[str, Any]]
) -> Optional[Dict[str, Any]]: ...
def merge(*args: Dict[str, Any]) -> Dict[str, Any]: ...
def get_profile(
    history: Sequence[Tuple[float, Dict[str, Any]]],
    recent: Optional[Dict[str, Any]],
    start: Optional[float],
    stop: Optional[float],
    exact: bool,
) -> Dict[str, Any]: ...
def plot_data(state: Dict[str, Any], profile_interval: float) -> Dict[str, List[Any]]: ...
