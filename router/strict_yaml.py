"""Reads YAML that people write (settings, API keys, engines), and refuses what PyYAML would silently misread.

A key that occurs twice is an error, because its first value would be lost. `1:8` and dates are text, as in YAML 1.2
(https://yaml.org/spec/1.2.2/#103-core-schema); YAML 1.1 has sexagesimal numbers and dates.
"""

from typing import Any

import yaml


class InvalidYamlError(ValueError):
    """The text is no YAML, or means nothing unambiguous."""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = set[str]()
        for key, _ in node.value:
            if str(key.value) in names:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} occurs twice", key.start_mark)
            names.add(str(key.value))
        return super().construct_mapping(node, deep)


def _integer_or_text(loader: _Loader, node: yaml.ScalarNode) -> int | str:
    return str(node.value) if ":" in node.value else loader.construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _integer_or_text)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: node.value)


def parse_yaml(text: bytes) -> Any:
    """The value of a UTF-8 text; None if it is empty. Raises InvalidYamlError."""
    try:
        return yaml.load(text.decode(), _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidYamlError(str(error)) from error
