#!/bin/sh
touch "$1/$RANK"
