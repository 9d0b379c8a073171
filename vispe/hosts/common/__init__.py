"""Code shared by all libraries: conversion, specs, context, positions, loading of weights."""
