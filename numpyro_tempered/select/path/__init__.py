"""The path of tempered posteriors from the prior upwards."""

from numpyro_tempered.select.path.driver import path_table, temper_path

__all__ = ["path_table", "temper_path"]
