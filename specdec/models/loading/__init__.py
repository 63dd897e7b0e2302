"""From a name, a folder or a hub id to a model that decodes: `load_model`."""

from specdec.models.loading.model import LoadedModel, load_model
from specdec.models.loading.sharing import shared_models

__all__ = ["LoadedModel", "load_model", "shared_models"]
