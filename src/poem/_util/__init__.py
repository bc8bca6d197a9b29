"""Small helpers that know nothing about models or methods."""
