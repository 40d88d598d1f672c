"""Online rules, one published algorithm in each module."""
