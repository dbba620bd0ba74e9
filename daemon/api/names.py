"""What the served model is called, and whether a request may call it that."""

from __future__ import annotations

from pathlib import Path

from daemon.api.services import Services
from daemon.errors import ModelLoading, ModelNotFound
from daemon.fair_queue import CLASSES
from daemon.messages import ModelInfo, Priority
from daemon.prompt.pool import VocabInfo

RETRY_AFTER = 5


def served_name(services: Services) -> str:
    """The id in /v1/models and in answers, also while nothing is loaded."""
    if services.supervisor.info is not None:
        return services.supervisor.info.name
    return services.config.model.name or Path(services.config.model.path).stem or "model"


def accepted_names(services: Services) -> set[str]:
    """The served id, the configured name, and the file's name with and without its suffix."""
    path = Path(services.config.model.path)
    names = {served_name(services), services.config.model.name, path.name, path.stem}
    return names - {""}


def check_model(name: str | None, services: Services) -> Priority | None:
    """Accept no name, one of `accepted_names`, or one of them with ":" and a class, which is returned.

    Raises:
        ModelNotFound: any other.
    """
    names = accepted_names(services)
    if not name or name in names:
        return None
    base, _, suffix = name.rpartition(":")
    for priority in CLASSES:
        if suffix == priority and base in names:
            return priority
    raise ModelNotFound(f"This server has one model, {served_name(services)}.", param="model")


def loaded(services: Services) -> ModelInfo:
    """The loaded model.

    Raises:
        ModelLoading: there is none yet.
    """
    info = services.supervisor.info
    if info is None:
        raise ModelLoading(loading_message(services), retry_after=RETRY_AFTER)
    return info


def vocabulary(services: Services) -> VocabInfo:
    """The vocabulary of the served model.

    Raises:
        ModelLoading: the text pool has not read it yet.
    """
    info: VocabInfo | None = getattr(services.pool, "info", None)
    if info is None:
        raise ModelLoading("The vocabulary is being read.", retry_after=RETRY_AFTER)
    return info


def state_of(services: Services) -> str:
    """ "ready" when requests are answered, else "loading", "restarting", "stopped" or "failed"."""
    if services.admission.closing:
        return "stopped"
    state = services.supervisor.state
    if state == "ready" and getattr(services.pool, "info", None) is None:
        return "loading"
    return state


def loading_message(services: Services) -> str:
    """Why there is no model to ask, in words."""
    supervisor, state = services.supervisor, state_of(services)
    if state == "loading":
        return f"The model is loading ({supervisor.progress:.0%})."
    words = {"restarting": "The engine is being restarted.", "stopped": "The service is stopping."}
    return words.get(state, supervisor.reason or "No model is loaded.")
