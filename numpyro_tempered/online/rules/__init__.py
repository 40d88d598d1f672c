"""Online rules, one published algorithm a module."""
